"""Generate text with a saved model: `python -m cs336_systems.train.sample runs/mine --prompt "def "`, on one device."""

import sys
from pathlib import Path

import click

from cs336_systems.checkpoint.__main__ import find
from cs336_systems.checkpoint.disk import refusing
from cs336_systems.checkpoint.folder import open_checkpoint
from cs336_systems.checkpoint.tensors import Checkpoint
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.machine import choose_device
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.train.recipe import OPTIONS, Recipe
from cs336_systems.train.run_log import sample_text


def read_model(checkpoint: Checkpoint) -> tuple[TransformerLM, Recipe]:
    """Read the whole model of a checkpoint, and its recipe. Raises UserError for a model that cannot write text."""
    folder = checkpoint.folder
    with refusing(str(folder), f"{folder} does not say what model it is of"):
        saved = {name: value for name, value in checkpoint.state["recipe"].items() if name in OPTIONS}
        recipe = Recipe.of(**saved)
        is_text = not recipe.model.is_bert and not recipe.data.is_random
        model = TransformerLM(recipe.model_config(), "meta")  # memory is taken for what the files have alone
    if not is_text:
        raise UserError(f"{folder} is of a model that has not learned to write text")
    try:
        model.load_state_dict({each.name: each.tensor.float() for each in checkpoint.weights()}, assign=True)
    except RuntimeError as error:  # names what lacks, and the shapes that differ
        raise UserError(f"{folder} has another model: {' '.join(str(error).split()):.300}") from None
    return model.eval(), recipe


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--prompt", default="def ", show_default=True, help="Text to continue.")
@click.option("--bytes", "length", type=click.IntRange(1), default=300, show_default=True, help="Length in bytes.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Random seed.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Device to run on.  [default: cuda if there is one]")
def main(path: Path, prompt: str, length: int, seed: int, device: str | None) -> None:
    """Generate text with the checkpoint at PATH, or with the newest checkpoint of the run in that folder."""
    model, recipe = read_model(open_checkpoint(find(path)[-1]))
    where = choose_device(device)
    context = recipe.seq(model.config)
    console.console().print(sample_text(model.to(where), where, context, prompt, length, seed), soft_wrap=True)


if __name__ == "__main__":
    sys.exit(console.run_command(main))
