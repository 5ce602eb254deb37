"""The typed tree of everything a run can be told. No torch here: `--help` and `--dry-run` must stay quick.

Every section is frozen and refuses unknown keys. Units are in the field descriptions, which also feed the JSON schema.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NonNegative = Annotated[float, Field(ge=0.0)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class RunConfig(Section):
    dir: str = Field("runs/default", description="Run folder: config, plan, metrics, report, logs, checkpoints.")
    seed: Natural = Field(0, description="Seed of weights, data order, dropout and masking.")
    modules: list[str] = Field([], description="Python files to load first; they may register models and objectives.")
    device: Literal["auto", "cpu", "cuda", "xpu", "npu"] = Field(
        "auto", description="auto: the accelerator torch finds, else cpu."
    )
    grace: Positive = Field(30.0, description="Seconds a rank may take to save and end after it was asked to stop.")
    timeout: NonNegative = Field(1800.0, description="Seconds without a step after which a rank ends itself; 0: never.")


class RopeScaling(Section):
    """Position scaling as Hugging Face writes it (`rope_type` and its numbers); an unknown type is refused."""

    rope_type: Literal["default", "linear", "dynamic", "llama3", "yarn"] = Field(
        "default", description="default: none; the others as in the papers of those names."
    )
    factor: Positive = Field(1.0, description="How many times longer than trained.")
    original_max_position_embeddings: Count | None = Field(None, description="Length that the model was trained for.")
    low_freq_factor: Positive | None = Field(
        None, description="llama3: wavelengths longer than original length / this are scaled in full."
    )
    high_freq_factor: Positive | None = Field(
        None, description="llama3: wavelengths shorter than original length / this are kept."
    )
    attention_factor: Positive | None = Field(None, description="yarn: factor on the rotated values; default: from factor.")
    beta_fast: Positive | None = Field(
        None, description="yarn: rotations over the original length above which a frequency is kept; default 32."
    )
    beta_slow: Positive | None = Field(None, description="yarn: rotations below which it is scaled in full; default 1.")
    mscale: float | None = Field(None, description="yarn: weight of the logarithm in the attention factor.")
    mscale_all_dim: float | None = Field(None, description="yarn: the same in its divisor.")
    truncate: bool | None = Field(None, description="yarn: round the borders to whole dimensions; default true.")


class ModelConfig(Section):
    """A model by numbers; `recipe` fills them, and a number given beside it wins."""

    recipe: str | None = Field(None, description="Name of a shipped recipe, e.g. llama-3-8b, bert-base, debug.")
    arch: str = Field("decoder", description="decoder, encoder, or a name registered by a file of run.modules.")
    layers: Count = Field(4, description="Transformer blocks.")
    width: Count = Field(256, description="Hidden size.")
    heads: Count = Field(4, description="Query heads.")
    kv_heads: Count | None = Field(None, description="Key/value heads; default: heads.")
    head_dim: Count | None = Field(None, description="Default: width / heads.")
    ffn: Count = Field(1024, description="Width of the feed-forward layer.")
    vocab: Count | None = Field(None, description="Rows of the embedding; default: the tokenizer's size.")
    max_len: Count = Field(2048, description="Longest sequence; the length of learned position tables.")
    positions: Literal["rope", "learned", "none"] = Field(
        "rope", description="rope: rotary; learned: a table added to the embedding; none: order is not seen."
    )
    position_offset: Natural = Field(0, description="First row used of a learned position table (RoBERTa: 2).")
    rope_theta: Positive = Field(10000.0, description="Base of the rotary frequencies.")
    rope_scaling: RopeScaling | None = Field(None, description="Rotary positions stretched past the trained length.")
    norm: Literal["rms", "layer"] = Field("rms", description="rms: RMSNorm; layer: LayerNorm with bias.")
    norm_eps: Positive = Field(1e-5, description="Added to the mean square before the root.")
    norm_order: Literal["pre", "post"] = Field(
        "pre", description="pre: norm before attention and feed-forward; post: after the residual sum."
    )
    final_norm: bool = Field(True, description="Norm after the last block.")
    embed_norm: bool = Field(False, description="Norm right after the embedding sum (BERT).")
    token_types: Natural = Field(0, description="Rows of the token-type table (BERT: 2); 0 is none.")
    activation: Literal["swiglu", "gelu", "gelu_tanh", "relu"] = Field(
        "swiglu",
        description="swiglu gates with silu and has a second input matrix; gelu is exact, gelu_tanh its approximation.",
    )
    qkv_bias: bool = Field(False, description="Bias of the query, key and value projections.")
    attention_bias: bool = Field(False, description="Bias of the attention output projection.")
    mlp_bias: bool = Field(False, description="Biases of the feed-forward layer.")
    qk_norm: bool = Field(False, description="RMS norm over each head of queries and keys (Qwen 3).")
    sliding_window: Count | None = Field(None, description="Keys each query sees, itself included.")
    experts: Natural = Field(
        0, description="Experts of every feed-forward layer, among which a router chooses; 0: one for all."
    )
    experts_per_token: Count = Field(2, description="Experts that a token goes to.")
    moe_ffn: Count | None = Field(None, description="Width of one expert; default: ffn.")
    router_normalised: bool = Field(
        True, description="The weights of a token's experts sum to 1 (Mixtral; norm_topk_prob of Qwen 3)."
    )
    balance: Literal["loss", "bias", "none"] = Field(
        "loss",
        description="loss: a row whose tokens crowd into few experts costs more; bias: a bias an expert steers the choice, "
        "without a loss; none.",
    )
    balance_coefficient: NonNegative = Field(0.001, description="loss: its weight; bias: how far it moves a step.")
    router_z_loss: NonNegative = Field(0.0, description="Weight of logsumexp(router logits)^2.")
    capacity: Positive | None = Field(
        None,
        description="Tokens of a row that an expert takes, over their even share; others pass it by and are counted. "
        "Default: no limit, no token is dropped.",
    )
    tied: bool = Field(False, description="Output matrix is the embedding matrix.")
    head_bias: bool = Field(False, description="Bias of the output matrix, one value a token of the vocabulary.")
    head_transform: bool = Field(False, description="Dense, activation and norm before the output matrix (BERT's MLM head).")
    head_dropout: Fraction | None = Field(None, description="Dropout before the classifier; default: dropout.")
    classes: Count | None = Field(None, description="Labels of a classification head; default: those found in the data.")
    pooler: bool = Field(True, description="Dense + tanh over the first position before the classifier (BERT).")
    dropout: Fraction = Field(0.0, description="Dropout on embeddings and on each residual branch.")
    attention_dropout: Fraction = Field(0.0, description="Dropout on attention weights.")
    init_std: Positive = Field(0.02, description="Standard deviation of the initial matrices.")
    init_depth_scaled: bool = Field(True, description="Divide the std of residual output projections by sqrt(2 * layers).")
    options: dict[str, Any] = Field({}, description="Free settings of a registered architecture.")


class Source(Section):
    path: str = Field(
        ...,
        description="File, folder or glob; 'embedded' is the text found on this machine, 'embedded:zh' the Chinese text in "
        "its Debian packages; or a prepared folder.",
    )
    weight: Positive | None = Field(None, description="Share of the samples in a blend; all sources or none carry one.")
    format: Literal["auto", "txt", "jsonl", "parquet", "csv"] = Field("auto", description="auto: by the ending of the name.")
    text_key: str = Field("text", description="Key or column of the text in jsonl, csv and parquet.")
    label_key: str | None = Field(None, description="Key or column of the label; needed by classify.")
    encoding: str = Field("utf-8", description="utf-8, gbk, gb18030, ..., or auto (per file, counted and reported).")


class TokenizerConfig(Section):
    path: str | None = Field(None, description="tokenizer.json, a folder with one, or a SentencePiece .model file.")
    vocab: Count = Field(8192, description="Size of the byte-level BPE trained on the corpus when no path is given.")
    sample_bytes: Count = Field(64 * 2**20, description="Bytes of text read to train it.")


class DataConfig(Section):
    train: list[Source] = Field([Source(path="embedded")], description="Corpora; several make a blend.")
    valid: list[Source] = Field([], description="Held-out corpora; empty: a share of the training documents.")
    valid_fraction: Fraction = Field(0.01, description="Share of the documents held out when valid is empty.")
    tokenizer: TokenizerConfig = TokenizerConfig()
    seq_len: Count = Field(512, description="Tokens a row.")
    packing: Literal["stream", "none"] = Field(
        "stream", description="stream: rows are cut from the concatenated documents; none: a document starts a row."
    )
    document_mask: bool = Field(True, description="Attention stays inside a document of a packed row.")
    on_bad_row: Literal["stop", "skip"] = Field("stop", description="Malformed rows: stop, or skip and count.")
    cache: str | None = Field(None, description="Folder for prepared shards; default: data/ of the run folder.")
    workers: Natural = Field(0, description="Processes that prepare; 0: one a core.")
    prefetch: Natural = Field(4, description="Micro-batches made ahead on a background thread; 0: none.")


class ObjectiveConfig(Section):
    kind: str = Field("causal_lm", description="causal_lm, masked_lm, classify, or a registered name.")
    label_smoothing: Fraction = Field(0.0, description="Share of the target's probability that is spread over the vocabulary.")
    z_loss: NonNegative = Field(0.0, description="Weight of logsumexp(logits)^2.")
    mask_fraction: Fraction = Field(0.15, description="masked_lm: share of the tokens that are predicted.")
    response_only: bool = Field(False, description="Rows have prompt and response; only response tokens are targets.")


class OptimizerConfig(Section):
    kind: Literal["adamw", "sgd"] = Field("adamw", description="adamw or plain sgd.")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), description="adamw: decay of the first and the second moment.")
    eps: Positive = Field(1e-8, description="adamw: added to the root of the second moment.")
    momentum: Fraction = Field(0.0, description="sgd only.")
    weight_decay: NonNegative = Field(
        0.1, description="adamw: a weight shrinks by lr * this a step; sgd: this * weight joins the gradient."
    )
    no_decay: list[str] = Field(
        ["bias", "norm", "embedding"], description="Parameters whose name has one of these words are not decayed."
    )

    @property
    def moments(self) -> int:
        """Tensors of its own that the optimizer keeps beside each parameter."""
        return 2 if self.kind == "adamw" else int(self.momentum > 0)


class ScheduleConfig(Section):
    kind: Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"] = Field(
        "cosine", description="Shape of the learning rate after the warm-up."
    )
    warmup: Natural = Field(0, description="Steps of linear warm-up.")
    total: Count | None = Field(None, description="Steps the decay is laid out for; default: the steps of the run.")
    min_ratio: Annotated[float, Field(ge=0, le=1)] = Field(0.1, description="Final learning rate over the peak.")
    decay: Annotated[float, Field(gt=0, le=1)] = Field(0.2, description="wsd: share of the steps in the final decay.")


class BatchRamp(Section):
    start: Count = Field(..., description="Rows a step at the start.")
    increment: Count = Field(..., description="Rows added each time.")
    samples: Count = Field(..., description="Samples over which the ramp goes from start to train.batch.")


class SyncConfig(Section):
    """How the replicas of a layout (`dp_replicate`) stay one model; within a replica (`dp_shard`, `tp`, `pp`) nothing changes.

    All but the default computes something else than one device.
    """

    method: Literal["every_step", "local_sgd", "diloco"] = Field(
        "every_step",
        description="every_step: gradients are summed over the replicas; local_sgd: each trains alone for `every` steps, then "
        "their weights are averaged; diloco: what moved is averaged and goes through an outer SGD with Nesterov momentum.",
    )
    every: Count = Field(20, description="local_sgd, diloco: steps a round.")
    warmup: Natural = Field(0, description="local_sgd, diloco: first steps that sum gradients instead.")
    outer_lr: Positive = Field(0.7, description="diloco: learning rate of the outer step.")
    outer_momentum: Fraction = Field(0.9, description="diloco: Nesterov momentum of the outer step.")
    overlap: bool = Field(
        False, description="diloco: average while the next round trains, and take the outer step one round late."
    )
    compress: Literal["none", "bf16", "powersgd"] = Field(
        "none",
        description="What crosses: gradients, or what moved in a round; rounded to bf16, or as matrices of low rank.",
    )
    rank: Count = Field(4, description="powersgd: rank of the matrices.")

    @property
    def local(self) -> bool:
        """Whether replicas train apart between exchanges."""
        return self.method != "every_step"

    @property
    def plain(self) -> bool:
        """Whether it is what one device would compute."""
        return not self.local and self.compress == "none"

    @property
    def buffers(self) -> int:
        """Tensors of its own that it keeps beside each parameter."""
        outer = 1 + (self.method == "diloco" and self.outer_momentum > 0) + 2 * self.overlap if self.local else 0
        return outer + (self.compress == "powersgd")


class TrainConfig(Section):
    batch: Count = Field(32, description="Global batch: rows a step over all ranks and micro-steps.")
    micro_batch: Count | None = Field(None, description="Rows a forward on one rank; default: what the plan rule finds.")
    ramp: BatchRamp | None = Field(None, description="Batch that grows at the start.")
    lr: Annotated[float, Field(gt=0, le=1e4)] = Field(3e-4, description="Peak learning rate.")
    lr_scaling: Literal["none", "linear", "sqrt"] = Field("none", description="How lr follows batch / lr_batch.")
    lr_batch: Count | None = Field(None, description="Global batch that lr was tuned for; needed by linear and sqrt.")
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    sync: SyncConfig = SyncConfig()
    clip: NonNegative = Field(1.0, description="Largest global gradient norm; 0: off.")
    ema: Fraction = Field(0.0, description="Decay of an averaged copy of the weights; 0: none.")
    steps: Count | None = Field(
        None, description="Stop after this many steps. The first limit that is reached ends the run; none given: one epoch."
    )
    tokens: Count | None = Field(None, description="Stop after this many tokens.")
    epochs: Positive | None = Field(None, description="Stop after this many passes over the rows; fractions are allowed.")
    hours: Positive | None = Field(
        None, description="Stop after this many hours of training, earlier parts of a resumed run included."
    )
    tail: Literal["step", "drop"] = Field(
        "step", description="Rows left at the end of an epoch: a smaller step, or dropped and counted."
    )
    on_nonfinite: Literal["stop", "skip"] = Field(
        "stop", description="A loss or norm that is not finite (outside fp16's own scaling)."
    )
    noise_scale: bool = Field(True, description="Measure the gradient noise scale and warn when the batch is far beyond it.")
    sync_check: Natural = Field(0, description="Every N steps compare what replicas hold in common; 0: never.")


class LossScaleConfig(Section):
    """fp16 only."""

    initial: Positive = Field(65536.0, description="Scale of the first step.")
    static: bool = Field(False, description="Keep the initial scale.")
    growth: Annotated[float, Field(ge=1)] = Field(2.0, description="Factor after `interval` steps without overflow.")
    backoff: Annotated[float, Field(gt=0, lt=1)] = Field(0.5, description="Factor after an overflow.")
    interval: Count = Field(1000, description="Steps without overflow before the scale grows.")
    hysteresis: Count = Field(1, description="The scale falls at this many overflows since it last grew.")
    floor: Positive = Field(1.0, description="Lowest scale.")


class EvaluateConfig(Section):
    every: Natural = Field(0, description="Steps between evaluations; 0: only at the end.")
    rows: Natural = Field(0, description="Rows of the held-out set that are used; 0: all.")
    patience: Natural = Field(0, description="Stop after this many evaluations without a better loss; 0: never.")
    best: bool = Field(True, description="Keep the checkpoint with the best held-out loss.")


class CheckpointConfig(Section):
    every: Natural = Field(0, description="Steps between checkpoints; 0: only at the end.")
    final: bool = Field(True, description="Save when the run ends or is stopped.")
    keep: Count = Field(2, description="Newest checkpoints kept, beside the best one.")
    background: bool = Field(True, description="Write while training goes on.")


class LogConfig(Section):
    every: Count = Field(10, description="Steps between progress lines; metrics.jsonl has every step.")
    tensorboard: bool = Field(False, description="Write event files into the run folder.")
    wandb: bool = Field(False, description="Send figures to Weights & Biases (needs the extra).")
    wandb_project: str = Field("meshwright", description="Project of the run there.")
    report: bool = Field(True, description="Write report.html at the end.")
    sample: str | None = Field(None, description="Prompt whose continuation is printed at the end.")
    sample_temperature: NonNegative = Field(0.7, description="0 takes the most likely token each time.")
    sample_tokens: Count = Field(48, description="Longest continuation.")


class Config(Section):
    """What to run. Values are resolved once, before any device is taken, and stored in the run folder."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    train: TrainConfig = TrainConfig()
    precision: Literal["fp32", "fp64", "bf16", "fp16", "fp8"] = Field(
        "fp32",
        description="Type of weights and activations in forward and backward; masters and moments are fp32 (fp64: fp64). "
        "fp8: as bf16, but the linear layers of the blocks multiply in 8 bits while they are trained.",
    )
    compile: Literal["auto", "off", "eager", "inductor"] = Field(
        "auto", description="auto: Inductor on GPUs, off on CPU; eager: aot_eager."
    )
    loss_scale: LossScaleConfig = LossScaleConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
