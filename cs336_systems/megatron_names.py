"""The options of Megatron-LM v2.5's pretraining scripts, and what each is here: the same, renamed, fixed or ignored.

A name with `=` takes one value, with `*` any number of them; the others are flags.
"""

SHARED = (
    "--num-layers=",
    "--micro-batch-size=",
    "--lr=",
    "--min-lr=",
    "--weight-decay=",
    "--adam-eps=",
    "--loss-scale=",
    "--initial-loss-scale=",
    "--loss-scale-window=",
    "--hysteresis=",
    "--min-loss-scale=",
    "--mask-prob=",
    "--short-seq-prob=",
    "--eval-interval=",
    "--eval-iters=",
    "--split=",
    "--vocab-file=",
    "--seed=",
    "--sequence-parallel",
)

RENAMED = {
    "--tensor-model-parallel-size=": "--tp",
    "--pipeline-model-parallel-size=": "--pp",
    "--num-layers-per-virtual-pipeline-stage=": "--chunks",
    "--use-distributed-optimizer": "--zero",  # of later releases
    "--distributed-backend=": "--backend",
    "--hidden-size=": "--d-model",
    "--num-attention-heads=": "--num-heads",
    "--ffn-hidden-size=": "--d-ff",
    "--seq-length=": "--context",
    "--encoder-seq-length=": "--context",
    "--max-position-embeddings=": "--max-context",
    "--make-vocab-size-divisible-by=": "--pad-vocabulary",
    "--attention-dropout=": "--dropout",
    "--hidden-dropout=": "--dropout",
    "--checkpoint-activations": "--recompute",
    "--checkpoint-num-layers=": "--recompute-every",
    "--global-batch-size=": "--batch-size",
    "--train-iters=": "--steps",
    "--train-samples=": "--steps",
    "--lr-decay-iters=": "--decay-steps",
    "--lr-decay-samples=": "--decay-steps",
    "--lr-decay-style=": "--decay",
    "--lr-warmup-fraction=": "--warmup-fraction",
    "--lr-warmup-iters=": "--warmup-steps",
    "--lr-warmup-samples=": "--warmup-steps",
    "--clip-grad=": "--clip",
    "--adam-beta1=": "--beta1",
    "--adam-beta2=": "--beta2",
    "--fp16": "--precision",
    "--bf16": "--precision",
    "--data-path*": "--data",
    "--tokenizer-type=": "--tokenizer",
    "--log-interval=": "--log-every",
    "--save=": "--out",
    "--save-interval=": "--save-every",
    "--load=": "--resume",  # from the folder of --save
}

FIXED = {"--init-method-std=": "0.02", "--layernorm-epsilon=": "1e-5", "--optimizer=": "adam"}

FLAGS = {
    "--fp16": "fp16",
    "--bf16": "bf16",
    "--checkpoint-activations": "segments",
    "--use-distributed-optimizer": "1",
}

# Why options are ignored. Names, and whether they take values, as in megatron/arguments.py, misspelling included.
LAUNCHER = "the launcher says it"
IGNORED = {
    "a checkpoint is written and read whole": "--finetune --no-save-optim --no-save-rng --no-load-optim --no-load-rng "
    "--override-lr-scheduler --use-checkpoint-lr-scheduler --adlr-autoresume --adlr-autoresume-interval=",
    LAUNCHER: "--local-rank=",
    "the log is a file, named with --log-file": "--tensorboard-dir= --tensorboard-log-interval= "
    "--tensorboard-queue-size= --log-params-norm --log-num-zeros-in-grad --log-timers-to-tensorboard "
    "--log-batch-size-to-tensorboard --no-log-learnig-rate-to-tensorboard --no-log-loss-scale-to-tensorboard "
    "--log-validation-ppl-to-tensorboard --log-memory-to-tensorboard",
    "the run ends after --steps": "--exit-interval= --exit-duration-in-mins=",
    "it says how Megatron-LM computes, not what": "--num-workers= --DDP-impl= --use-contiguous-buffers-in-ddp "
    "--no-scatter-gather-tensors-in-pipeline --use-cpu-initialization --lazy-mpu-init= --data-impl= --mmap-warmup "
    "--dataloader-type= --onnx-safe= --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion "
    "--distribute-checkpointed-activations",
    "say --recompute segments": "--activations-checkpoint-method= --activations-checkpoint-num-layers=",
    "mixed precision is --precision alone": "--attention-softmax-in-fp32 --no-query-key-layer-scaling "
    "--fp32-residual-connection --fp16-lm-cross-entropy --accumulate-allreduce-grads-in-fp32",
    "there is no such choice here, so the runs may differ in it": "--kv-channels= --openai-gelu --bert-no-binary-head "
    "--apply-residual-connection-post-layernorm --init-method-xavier-uniform --rampup-batch-size* --sgd-momentum= "
    "--merge-file= --vocab-extra-ids= --sample-rate= --decoder-seq-length= --reset-position-ids "
    "--reset-attention-mask --eod-mask-loss",
    "it belongs to other models of Megatron-LM": "--ict-head-size= --ict-load= --bert-load= --block-data-path= "
    "--biencoder-projection-dim= --biencoder-shared-query-context-model --titles-data-path= --query-in-block-prob= "
    "--use-one-sent-docs --evidence-data-path= --embedding-path= --retriever-report-topk-accuracies* "
    "--retriever-score-scaling --retriever-seq-length= --indexer-batch-size= --indexer-log-interval= --num-classes= "
    "--img-dim= --num-channels= --patch-dim=",
}

# What --size replaces; REQUIRED is the part that Megatron asks for, with this project's names.
SHAPE = (
    "--num-layers",
    "--hidden-size",
    "--num-attention-heads",
    "--ffn-hidden-size",
    "--seq-length",
    "--encoder-seq-length",
    "--max-position-embeddings",
)
REQUIRED = {"--num-layers": "--num-layers", "--hidden-size": "--d-model", "--num-attention-heads": "--num-heads"}
BERT_DATA = ("--vocab-file", "--split", "--mask-prob")
# Megatron's defaults that differ from this project's and change what is learned.
DEFAULTS = {
    "--decay": "linear",
    "--min-lr": "0.0",
    "--warmup-steps": "0",
    "--weight-decay": "0.01",
    "--beta2": "0.999",
    "--clip": "1.0",
    "--dropout": "0.1",
}
WARMUP = {"--warmup-fraction": "--warmup-steps"}  # two units of one thing
