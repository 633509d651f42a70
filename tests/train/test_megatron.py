"""Megatron-LM's command line in this project's words: the study's option string, every option, and who wins."""

import re
from dataclasses import replace

import pytest

from cs336_systems.errors import UserError
from cs336_systems.presets import model_preset
from cs336_systems.train.__main__ import main
from cs336_systems.train.megatron import translate
from cs336_systems.train.recipe import Recipe

# The 8-GPU run of the scaling study, whose paths alone are others here.
STUDY = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512 "
    "--lr 0.0001 --lr-decay-iters 990000 --train-iters 2000000 --min-lr 0.00001 --lr-warmup-fraction 0.01 "
    "--vocab-file vocab.txt --split 949,50,1 --fp16 --micro-batch-size 4 --global-batch-size 32 "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --log-interval 10 --save-interval 500 "
    "--eval-interval 100 --eval-iters 10 --checkpoint-activations --save out --data-path text"
)
SHAPE = "--num-layers 24 --d-model 1024 --num-heads 16 --context 512 --max-context 512"
TRAINING = (
    "--min-lr 0.00001 --warmup-fraction 0.01 --vocab-file vocab.txt --split 949,50,1 --precision fp16 "
    "--micro-batch-size 4 --batch-size 32 --tp 2 --pp 2 --log-every 10 --save-every 500 "
    "--eval-interval 100 --eval-iters 10 --recompute segments --out out --data text"
)
TINY = "--size tiny --device cpu --steps 3"
# What Megatron-LM's examples of 2025 say; the rest of their options is EXAMPLE_RUN.
GPT_175B = (
    "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 "
    "--attention-backend auto --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375 "
    "--train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 "
    "--clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 "
    "--lr-decay-iters 430000 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 "
    "--vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --split 949,50,1"
)
LLAMA_8B = (
    "--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192 "
    "--position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 "
    "--hidden-dropout 0.0 --swiglu --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p "
    "--untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1 --global-batch-size 128 "
    "--train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --lr 0.00015 "
    "--min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0 "
    "--weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion "
    "--calculate-per-token-loss --manual-gc --empty-unused-memory-level 1 --exit-duration-in-mins 235 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --fp8-format hybrid "
    "--fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather --tensor-model-parallel-size 1 "
    "--context-parallel-size 1 --sequence-parallel --mock-data --tokenizer-type NullTokenizer --vocab-size 128256 "
    "--data-cache-path cache --tiktoken-pattern v2 --split '99,1,0' --no-create-attention-mask-in-dataloader "
    "--no-mmap-bin-files --num-workers 1 --log-throughput --profile --profile-step-start 4 --profile-step-end 6 "
    "--ckpt-format torch_dist --distributed-timeout-minutes 60"
)
EXAMPLE_RUN = "--log-interval 9 --save-interval 9 --eval-interval 9 --save out --load out --tensorboard-dir logs"


SMALL = "--num-layers 2 --hidden-size 8 --num-attention-heads 4"
WIN = "(this project's own names win)"
AS_BERT = "--decay linear --min-lr 0.0 --warmup-steps 0 --weight-decay 0.01 --beta2 0.999 --clip 1.0 --dropout 0.1"


def words(text: str) -> tuple[str, str]:
    """The translated tokens of a line and its notes, each in one string."""
    tokens, notes = translate(text.split())
    return " ".join(tokens), "\n".join(notes)


@pytest.mark.parametrize(
    ("line", "ranks", "preset", "changes"),
    [
        (STUDY, 8, "bert-345m", {"recompute": "segments"}),
        (GPT_175B, 128, "gpt3-175b", {"dropout": 0.1}),
        (LLAMA_8B, 8, "llama-8b", {"norm": "layernorm", "rotary_base": 1e6}),
        (f"{LLAMA_8B} --normalization RMSNorm --rotary-base 500000", 8, "llama-8b", {}),
    ],
)
def test_the_examples_of_today_are_the_models_that_they_are_named_after(line, ranks, preset, changes):
    given = main.make_context("train", f"{line} {EXAMPLE_RUN}".split()).params
    assert not given.pop("stray"), "a value that its option did not take"
    recipe = Recipe.of(**given)
    config, meant = recipe.model_config(), model_preset(preset)
    recipe.check(config, ranks)
    assert replace(config, attention="naive") == meant.override(**changes)
    assert recipe.model.is_bert is (preset == "bert-345m")


def test_the_notes_of_a_llama_name_what_is_not_here():
    notes = words(LLAMA_8B)[1]
    assert "--fp8-format hybrid, --fp8-amax-history-len 1024, --fp8-amax-compute-algo max, --fp8-param-gather" in notes
    assert "ignored: --sequence-parallel (it needs tensor parallelism, without which Megatron-LM leaves" in notes
    assert "ignored: --tokenizer-type NullTokenizer (random tokens need none)" in notes
    assert "--disable-bias-linear holds for the norms' biases, too (one option here)" in notes
    assert "--disable-bias-linear" not in words(f"{LLAMA_8B} --normalization RMSNorm")[1]
    # A size keeps all of its shape.
    tokens, notes = words(f"--size tiny {LLAMA_8B}")
    assert not {"--bias", "--positions", "--rotary-base", "--norm", "--d-ff", "--num-kv-heads"} & set(tokens.split())
    assert "--untie-embeddings-and-output-weights, --disable-bias-linear (--size tiny sets the shape)" in notes


def test_which_model_a_line_describes():
    for sign in ("--merge-file m --vocab-file v", "--swiglu", "--tokenizer-type NullTokenizer --mock-data"):
        assert "--objective lm " in words(f"{SMALL} {sign}")[0]
    for sign in ("--bert-no-binary-head", "--vocab-file v --tokenizer-type BertWordPieceCase", "--short-seq-prob 0.1"):
        tokens, notes = words(f"{SMALL} {sign}")
        assert "--objective bert " in tokens
        assert "taken for" not in notes
    guess = "taken for a BERT, since no option is GPT's alone; for a GPT say --objective lm"
    assert words(SMALL)[1].endswith(guess)
    assert words(f"{SMALL} --normalization LayerNorm --position-embedding-type learned_absolute")[1].endswith(guess)
    assert guess not in words(f"{SMALL} --objective lm")[1]
    both = f"{SMALL} --mask-prob 0.1 --merge-file m"
    with pytest.raises(UserError, match=r"^--mask-prob 0.1 is BERT's and --merge-file m is GPT's; say --objective"):
        words(both)
    assert "--objective" not in words(f"{both} --objective bert")[1]


@pytest.mark.parametrize("size", ["", "before", "after"])
def test_the_option_string_of_the_study(size):
    """Also at another size, wherever that stands."""
    tokens, notes = words({"": STUDY, "before": f"{TINY} {STUDY}", "after": f"{STUDY} {TINY}"}[size])
    of_bert, width = "--objective bert --tokenizer wordpiece", "" if size else "--d-ff 4096 "
    added = f"{of_bert} {width}--decay linear --weight-decay 0.01 --beta2 0.999 --clip 1.0 --dropout 0.1"
    run = f"--lr 0.0001 --decay-steps 990000 {'' if size else '--steps 2000000 '}{TRAINING}"
    assert tokens == {"": f"{SHAPE} {run}", "before": f"{TINY} {run}", "after": f"{run} {TINY}"}[size] + f" {added}"
    replaced = (
        "ignored: --num-layers 24, --hidden-size 1024, --num-attention-heads 16, --seq-length 512, "
        "--max-position-embeddings 512 (--size tiny sets the shape)\n"
        f"replaced: --train-iters 2000000 by --steps 3 {WIN}\n"
    )
    said = f"added: {added.replace(' --', ', --')} (what Megatron-LM takes for granted)"
    assert notes == (replaced if size else "") + said


@pytest.mark.parametrize(
    ("megatron", "ours", "note"),
    [
        # Options one at a time that are not in STUDY; None: as they are.
        ("--use-distributed-optimizer", "--zero 1", ""),
        ("--distributed-backend gloo", "--backend gloo", ""),
        ("--distributed-timeout-minutes 2", "--timeout 120", ""),
        ("--make-vocab-size-divisible-by 64", "--pad-vocabulary 64", ""),
        ("--recompute-granularity selective", "--recompute attention", ""),
        ("--checkpoint-activations --checkpoint-num-layers 3", "--recompute segments --recompute-every 3", ""),
        ("--train-samples 71 --global-batch-size 35", "--steps 2 --batch-size 35", ""),
        ("--lr-decay-samples 8 --global-batch-size 8", "--decay-steps 1 --batch-size 8", ""),
        ("--lr-decay-style cosine", "--decay cosine", ""),
        ("--lr-decay-style linear", "--decay linear", ""),
        ("--lr-warmup-iters 4", "--warmup-steps 4", ""),
        ("--lr-warmup-samples 0 --global-batch-size 8", "--warmup-steps 0 --batch-size 8", ""),
        ("--clip-grad 0.5", "--clip 0.5", ""),
        ("--adam-beta1 0.8 --adam-beta2 0.9", "--beta1 0.8 --beta2 0.9", ""),
        ("--bf16", "--precision bf16", ""),
        ("--tokenizer-type BertWordPieceLowerCase", "--tokenizer wordpiece --lower-case", ""),
        ("--tokenizer-type BertWordPieceCase", "--tokenizer wordpiece", ""),
        ("--init-method-std 2e-2 --layernorm-epsilon 0.00001 --optimizer adam", "", ""),
        ("--lr 1 --min-lr 0 --weight-decay 0 --adam-eps 1e-6 --loss-scale 8 --initial-loss-scale 4", None, ""),
        ("--loss-scale-window 5 --hysteresis 1 --min-loss-scale 2 --short-seq-prob 0.2 --micro-batch-size 4", None, ""),
        ("--eval-interval 5 --eval-iters 1 --seed 3 --sequence-parallel", None, ""),
        ("--size llama-8b --rotary-base 1e6", None, ""),
        ("--fp16 --micro-batch-size 2", "--precision fp16 --micro-batch-size 2", ""),
        # Two that have to agree, and the last of equal ones.
        ("--attention-dropout 0.1", "--dropout 0.1", ""),
        ("--hidden-dropout 0.1 --attention-dropout .1", "--dropout 0.1", ""),
        ("--hidden-dropout 0.0 --attention-dropout 0", "--dropout 0.0", ""),
        ("--hidden-dropout 0.0", "--dropout 0.0", "--hidden-dropout 0.0 holds for all dropout (one option here)"),
        ("--train-iters 5 --train_iters 7 --data-path a --data-path b", "--steps 7 --data b", ""),
        # Texts, whose weights fall away.
        ("--data-path a b", "--data a --data b", ""),
        ("--data-path 1 2 3", "--data 1 --data 2 --data 3", ""),
        ("--data-path a 2", "--data a --data 2", ""),
        ("--data-path .3 a 7 b", "--data a --data b", "ignored: the weights .3, 7 of --data-path (texts are read one"),
        # A run's folder.
        ("--save a --save-interval 5", "--out a --save-every 5", ""),
        ("--save a --load=a", "--out a --resume", ""),
        ("--load a", "--resume --out a", ""),
        ("--out a --load a", "--out a --resume", ""),
        ("--save a --load b", "--out a", "ignored: --load b (a run goes on in the folder that it saves to)"),
        # What is ignored, with its values.
        (
            "--finetune --fp16 --num-workers 2 --no_load_optim",
            "--precision fp16",
            "ignored: --finetune, --no-load-optim (a checkpoint is written and read whole)\n"
            "ignored: --num-workers 2 (it says how Megatron-LM computes, not what)",
        ),
        ("--num-workers=2 --fp16", "--precision fp16", "ignored: --num-workers 2 (it says how Megatron-LM computes"),
        ("--init-method-std 0.01", "", "ignored: --init-method-std 0.01 (here it is 0.02)"),
        ("--layernorm-epsilon 1e-12", "", "ignored: --layernorm-epsilon 1e-12 (here it is 1e-5)"),
        ("--num-layers 2 --local_rank 0", "--num-layers 2", "ignored: --local-rank 0 (the launcher says it)"),
        # Unknown tokens stay as they are.
        ("--no-such 1 two --x=3 -q --d_model 4", None, ""),
        ("a.txt b=c --steps 3 -- --fp16 --save", None, ""),
        ("--data a b --prompt= --data=c d", "--data a --data b --prompt= --data c --data d", ""),
        ("--lr=1 --min_lr=0", "--lr=1 --min-lr=0", ""),
        # No name here is Megatron-LM's alone, by which its defaults would come.
        ("--num-layers 2 --vocab-file v --split 1,1 --mask-prob 0.1", None, ""),
        ("--lr 1 --micro-batch-size 2", None, ""),
    ],
)  # fmt: skip
def test_a_line_in_our_words_with_a_note_for_each_reason(megatron, ours, note):
    ours = megatron if ours is None else ours
    tokens, notes = words(megatron)
    assert tokens == ours
    assert notes.startswith(note) if note else not notes
    if note or " -- " in megatron or "d_model" in megatron:
        return
    pieces = megatron.split()
    assert translate([f"--{p[2:].replace('-', '_')}" if p[:2] == "--" else p for p in pieces]) == translate(pieces)
    assert translate([*pieces, "--x"])[0] == (*translate(pieces)[0], "--x")
    if megatron.count(" ") == 1 and "=" not in megatron:
        assert words(f"{'='.join(pieces)} a") == (f"{ours} a", "")


@pytest.mark.parametrize(
    ("own", "megatron"),
    [
        ("--tp 1", "--tensor-model-parallel-size 2"),
        ("--precision bf16", "--fp16"),
        ("--precision=fp32", "--fp16"),
        ("--warmup-steps 3", "--lr-warmup-fraction 0.01"),
        ("--warmup-fraction 0.1", "--lr-warmup-iters 3"),
        ("--recompute none", "--checkpoint-activations"),
        ("--data random", "--data-path 1 a 2 b"),
        ("--chunks 2", "--num-layers-per-virtual-pipeline-stage 1"),
        ("--dropout 0", "--hidden-dropout 0.3"),
        ("--tokenizer bytes", "--tokenizer-type GPT2BPETokenizer"),
    ],
)
def test_own_names_win_wherever_they_stand(own, megatron):
    note = f"replaced: {megatron} by {own.replace('=', ' ')} {WIN}"
    assert words(f"{own} {megatron}") == (own, note)
    assert words(f"{megatron} {own}") == (own, note)


def test_a_whole_shape():
    assert words(SMALL)[0].startswith("--num-layers 2 --d-model 8 --num-heads 4 --objective bert --d-ff 32 ")
    given = f"{SMALL} --ffn-hidden-size 5 --seq-length 3 --max-position-embeddings 6"
    assert "--d-ff 5 --context 3 --max-context 6 --objective" in words(given)[0]
    assert "--d-ff 32" not in words(given)[0]
    # Our own width decides, and our own names may complete the shape.
    assert "--d-ff 64" in words(f"{SMALL} --d-model 16")[0]
    assert "--d-ff 64" in words("--num-layers 2 --num-attention-heads 4 --d-model 16")[0]
    tokens, notes = words("--num-layers 2 --ffn-hidden-size 8 --d-model 64 --encoder_seq_length 4 --preset=tiny")
    assert tokens.startswith("--d-model 64 --preset=tiny --objective bert --decay")
    assert notes.startswith("ignored: --num-layers 2, --ffn-hidden-size 8, --encoder-seq-length 4 (--preset tiny sets")
    # Of a GPT: two thirds of 4 x 96, and groups of heads.
    assert "--d-ff 256 " in words(f"{SMALL} --d-model 96 --swiglu")[0]
    assert "--num-kv-heads 1 " in words(f"{SMALL} --group-query-attention")[0]
    for groups in ("--group-query-attention --num-query-groups 2", "--num-query-groups 2 --group-query-attention"):
        assert words(f"{SMALL} {groups}")[0].count("--num-kv-heads 2") == 1
    ignored = "ignored: --num-query-groups 2 (it needs --group-query-attention)"
    assert ignored in words(f"{SMALL} --num-query-groups 2")[1]


def test_defaults_come_with_a_bert_in_megatrons_words():
    note = f"{AS_BERT.replace(' --', ', --')} (what Megatron-LM takes for granted)"
    assert words("--mask-prob 0.1 --fp16") == (
        f"--mask-prob 0.1 --precision fp16 --objective bert {AS_BERT}",
        f"added: --objective bert, {note}",
    )
    assert words("--split 1 --fp16 -- --bf16")[0] == f"--split 1 --precision fp16 --objective bert {AS_BERT} -- --bf16"
    assert words("--seq-length 4")[0] == f"--context 4 --objective bert {AS_BERT}"
    # The horizon is that of the run that was meant.
    for meant in ("--train-iters 9", "--train-iters 9 --steps 3", "--train-samples 37 --global-batch-size 4 --steps 3"):
        assert "--objective bert --decay-steps 9 --decay linear" in words(f"--seq-length 4 {meant}")[0]
    # Every default gives way to what is said, in either language.
    said = "--decay cosine --adam-beta2 0.9 --clip-grad 2 --weight-decay 0 --min-lr=1 --lr-warmup-fraction 0.1"
    said += " --dropout 0 --objective lm --lr-decay-iters 3 --train-iters 9"
    assert words(f"--seq-length 4 {said}")[1] == ""
    assert "--warmup-steps" not in words("--seq-length 4 --warmup-fraction 0.1")[0]
    assert "--tokenizer" not in words("--vocab-file v --fp16 --objective lm")[0]
    assert "--objective bert --tokenizer wordpiece" in words("--vocab-file v --fp16 --objective bert")[0]
    assert "wordpiece" not in words("--vocab-file v --fp16 --tokenizer bytes")[0]


def test_virtual_stages_become_chunks():
    virtual = "--num-layers-per-virtual-pipeline-stage"
    shape = "--num-layers 24 --hidden-size 8 --num-attention-heads 4"
    tokens, notes = words(f"{shape} --pipeline-model-parallel-size 4 {virtual} 2")
    assert "--pp 4 --chunks 3 --schedule interleaved" in tokens
    assert notes.startswith("added: --schedule interleaved, --objective bert")
    assert "--chunks 6" in words(f"{shape} --pp 2 --pipeline-model-parallel-size 4 {virtual} 2")[0]
    assert "--schedule" not in words(f"{shape} --pp 4 {virtual} 6")[0]
    assert words(f"{shape} --pp 4 {virtual} 2 --schedule 1f1b")[0].count("--schedule") == 1
    for line in (f"{shape} {virtual} 2", f"--pp 2 {virtual} 2", f"--size tiny {shape} --pp 2 {virtual} 2"):
        with pytest.raises(UserError, match=r"stage 2 needs --num-layers and --pipeline-model-parallel-size"):
            words(line)
    with pytest.raises(UserError, match=r"^--num-layers 24 is not a multiple of 4 stages x 5 layers in a chunk$"):
        words(f"{shape} --pp 4 {virtual} 5")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--train-iters", "--train-iters lacks its value"),
        ("--save --fp16", "--save lacks its value"),
        ("--save --", "--save lacks its value"),
        ("--fp16=1", "--fp16 is a flag and takes no value, not '1'"),
        ("--fp16 --bf16", "--fp16 and --bf16 do not agree on --precision; give one of them"),
        ("--hidden-dropout 0.1 --attention-dropout 0.0", "--attention-dropout 0.0 do not agree on --dropout"),
        ("--lr-warmup-fraction 2 --lr-warmup-iters 2", "--lr-warmup-iters 2 do not agree on --warmup-steps"),
        ("--train-samples 8", "--train-samples 8 counts samples; say with --global-batch-size how many make a step"),
        ("--train-samples 8 --global-batch-size 9", "--train-samples 8 is less than one global batch of 9"),
        ("--train-samples 8 --global-batch-size x", "--global-batch-size takes a whole number, not 'x'"),
        ("--train-samples 8 --global-batch-size 0", "--global-batch-size must be at least 1, not 0"),
        ("--train-samples -3 --batch-size 1", "--train-samples must be at least 0, not -3"),
        ("--num-layers 1 --num-attention-heads 1 --hidden-size x", "--hidden-size takes a whole number, not 'x'"),
        ("--hidden-size 8", "--hidden-size 8 is part of a shape; give --num-layers and --num-attention-heads as well"),
        ("--tokenizer-type GPT2BPETokenizer", "does not exist here; use --tokenizer wordpiece or --tokenizer bytes"),
        ("--encoder-num-layers 12 --decoder-num-layers 12 --hidden-size 768", "--encoder-num-layers is T5's"),
        ("--cp-comm-type a2a+p2p", "--cp-comm-type a2a+p2p does not exist here; use p2p, all_gather or a2a"),
        (f"{SMALL} --kv-channels 4", "--kv-channels 4 does not exist here; it is 2"),
        ("--position-embedding-type relative", "relative does not exist here; use learned_absolute, rope or none"),
        ("--lr-decay-style constant", "constant does not exist here; give --min-lr the value of --lr instead"),
    ],
)
def test_refusals(line, message):
    with pytest.raises(UserError, match=re.escape(message)):
        translate(line.split())
