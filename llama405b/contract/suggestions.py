"""What an unknown flag or setting was meant to be: other programs' names for ours, what is not offered, near misses. Pure."""

import difflib
from collections.abc import Collection, Iterable

from llama405b.contract.phrases import given

LIKENESS = 0.8  # of 0 to 1: below, a suggestion would be a guess
BATCH, MICRO_BATCH = "training.global_batch_size", "training.micro_batch_size"
# As Hugging Face's, torchrun's and other trainers call it: the setting of ours.
SETTINGS = {
    "model": "model.path", "model_name": "model.path", "model_name_or_path": "model.path", "base_model": "model.path",
    "attn_implementation": "model.attention", "flash_attn": "model.attention", "use_flash_attention": "model.attention",
    "torch_compile": "model.compile",
    "gradient_checkpointing": "model.activation_checkpointing", "activation_checkpoint": "model.activation_checkpointing",
    "data": "data.paths", "dataset": "data.paths", "datasets": "data.paths", "dataset_name": "data.paths",
    "dataset_path": "data.paths", "train_file": "data.paths", "data_path": "data.paths", "train_data": "data.paths",
    "max_seq_length": "data.seq_len", "max_seq_len": "data.seq_len", "max_length": "data.seq_len", "block_size": "data.seq_len",
    "sequence_length": "data.seq_len", "context_length": "data.seq_len", "cutoff_len": "data.seq_len",
    "model_max_length": "data.seq_len", "dataloader_num_workers": "data.workers", "num_workers": "data.workers",
    "bs": BATCH, "batchsize": BATCH, "batch_size": BATCH, "train_batch_size": BATCH, "global_batch": BATCH,
    "per_device_train_batch_size": MICRO_BATCH,
    "micro_batch": MICRO_BATCH, "train_micro_batch_size_per_gpu": MICRO_BATCH, "local_batch_size": MICRO_BATCH,
    "num_train_epochs": "training.epochs", "num_epochs": "training.epochs", "steps": "training.max_steps",
    "num_steps": "training.max_steps", "train_steps": "training.max_steps", "learning_rate": "optimizer.lr",
    "warmup_steps": "optimizer.warmup", "num_warmup_steps": "optimizer.warmup", "lr_scheduler_type": "optimizer.decay",
    "lr_scheduler": "optimizer.decay", "adam_beta1": "optimizer.betas", "adam_beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.eps", "max_grad_norm": "optimizer.max_norm", "clip_grad": "optimizer.max_norm",
    "gradient_clipping": "optimizer.max_norm", "dtype": "parallel.numerics", "torch_dtype": "parallel.numerics",
    "mixed_precision": "parallel.numerics", "precision": "parallel.numerics", "cpu_offload": "parallel.offload",
    "output_dir": "checkpoint.dir", "save_dir": "checkpoint.dir", "checkpoint_dir": "checkpoint.dir",
    "save_steps": "checkpoint.every", "save_interval": "checkpoint.every", "save_strategy": "checkpoint.every",
    "save_total_limit": "checkpoint.keep", "load_best_model_at_end": "checkpoint.keep_best",
    "eval_steps": "evaluation.every", "eval_strategy": "evaluation.every", "evaluation_strategy": "evaluation.every",
    "eval_interval": "evaluation.every", "eval_dataset": "evaluation.paths", "validation_file": "evaluation.paths",
    "per_device_eval_batch_size": "evaluation.micro_batch_size",
    "tp_size": "parallel.tp", "tensor_parallel": "parallel.tp", "tensor_parallel_size": "parallel.tp",
    "tensor_model_parallel_size": "parallel.tp", "pp_size": "parallel.pp", "pipeline_parallel_size": "parallel.pp",
    "pipeline_model_parallel_size": "parallel.pp", "cp_size": "parallel.cp", "context_parallel_size": "parallel.cp",
    "data_parallel_replicate_degree": "parallel.dp_replicate", "pipeline_parallel_schedule": "parallel.pp_schedule",
    "lora_r": "adapter.rank", "lora_rank": "adapter.rank", "lora_alpha": "adapter.alpha", "lora_target_modules": "adapter.targets",
    "target_modules": "adapter.targets", "peft_path": "adapter.path", "adapter_name_or_path": "adapter.path",
    "wandb_project": "tracking.project", "wandb_entity": "tracking.entity", "wandb_run_name": "tracking.display_name",
    "wandb_group": "tracking.group", "wandb_tags": "tracking.tags", "report_to": "tracking.to", "loggers": "tracking.to",
    "sharding": "parallel.strategy", "fsdp_version": "parallel.strategy", "zero_stage": "parallel.strategy",
}  # fmt: skip
# What settings, and their values, were called until 0.2.0.
RENAMED = {
    "data.learn": "data.train_on", "training.on_spike": "training.on_loss_spike", "training.spike": "training.loss_spike_factor",
    "checkpoint.place": "checkpoint.storage", "checkpoint.storage node": "local",
    "parallel.fsdp": "parallel.strategy", "parallel.offload states": "optimizer", "parallel.offload full": "all",
}  # fmt: skip
HOSTS_FILE = "the hosts file, HOSTS, says it: one host per line, rank 0 on the first"
SLOTS = "slots= in the hosts file says how many ranks a host has; by default one per GPU"
MEETING = "launch finds where the hosts meet; address= in the hosts file overrides it, and --port the port"
ACCUMULATION = f"gradient accumulation follows from --{BATCH}, --{MICRO_BATCH} and the number of ranks"
ZERO = "write --parallel.strategy zero1, zero2 or zero3, without DeepSpeed"
LORA = "write --adapter.kind lora"
BF16 = "BF16 compute with FP32 master weights is the default; --parallel.numerics changes it"
# What has no setting of its own: what to do instead.
ADVICE = {
    "gradient_accumulation_steps": ACCUMULATION, "accumulation_steps": ACCUMULATION, "grad_accum": ACCUMULATION,
    "nproc_per_node": SLOTS, "gpus": SLOTS, "num_gpus": SLOTS, "gpus_per_node": SLOTS, "num_processes": SLOTS,
    "nnodes": HOSTS_FILE, "num_nodes": HOSTS_FILE, "num_machines": HOSTS_FILE, "hostfile": HOSTS_FILE, "hosts": HOSTS_FILE,
    "node_rank": HOSTS_FILE, "machine_rank": HOSTS_FILE, "master_addr": MEETING, "master_port": MEETING,
    "main_process_ip": MEETING, "main_process_port": MEETING, "rdzv_endpoint": MEETING, "rdzv_backend": MEETING,
    "rdzv_id": MEETING, "max_restarts": "--restart N guards the run, and resumes it from its newest checkpoint",
    "resume_from_checkpoint": "write --resume auto, for the newest checkpoint that verifies, or --resume STEP",
    "do_eval": "write --evaluate-only, to evaluate without training", "eval_only": "write --evaluate-only",
    "eval_on_start": "with --evaluation.every a new run is evaluated before its first step, too",
    "wandb": "write --tracking.to wandb", "use_wandb": "write --tracking.to wandb", "tensorboard": "write --tracking.to tensorboard",
    "lora": LORA, "use_lora": LORA, "peft": LORA, "use_peft": LORA, "lora_dropout": "adapters have no dropout; leave it out",
    "fp8": "write --parallel.numerics fp8 --model.compile true", "bf16": BF16,
    "run_name": "write --run NAME", "job_name": "write --run NAME", "name": "write --run NAME",
    "logging_steps": "every step is logged", "log_interval": "every step is logged",
    "warmup_ratio": "the warmup is a number of steps, --optimizer.warmup",
    "tokenizer": "the tokenizer is read from the directory of --model.path",
    "tokenizer_name": "the tokenizer is read from the directory of --model.path",
    "optim": "the optimizer is AdamW; its settings begin with --optimizer.",
    "sequence_parallel": "it is part of --parallel.tp", "ddp": "write --parallel.strategy ddp", "zero": ZERO, "deepspeed": ZERO,
    "deepspeed_config": ZERO,
    "hf_token": "export HF_TOKEN, and write --secret HF_TOKEN", "token": "export HF_TOKEN, and write --secret HF_TOKEN",
    "push_to_hub": "`llama405b export RUN OUT --push-to-hub REPO` does that after training",
    "hub_model_id": "`llama405b export RUN OUT --push-to-hub REPO` does that after training",
}  # fmt: skip
NO_FP16 = "FP16 loses small gradients unless the loss is scaled, which is not done here; use fp32-master, which computes in BF16"
NO_QLORA = (
    "FSDP shards matrices by rows, which packed 4-bit blocks are not, and what is trained beside rounded weights is merged into others; "
    "use lora, with --parallel.offload all where the BF16 weights do not fit"
)
# What is said of a setting's value that is none.
OF_VALUES = {
    **{f"adapter.kind {name}": NO_QLORA for name in ("qlora", "4bit", "nf4")},
    **{f"parallel.numerics {name}": NO_FP16 for name in ("fp16", "float16", "half")},
    **{
        f"parallel.numerics {name}": "use fp32-master (BF16 with FP32 weights) or pure-bf16"
        for name in ("bf16", "bfloat16")
    },
}
# What there is not: its name.
NOT_OFFERED = {
    "QLoRA": ("qlora", "load_in_4bit", "load_in_8bit", "quantization", "bnb_4bit_compute_dtype"),
    "FP16": ("fp16", "half"),
    "MLflow": ("mlflow", "mlflow_tracking_uri"),
    "preference training": ("dpo", "rlhf", "ppo", "reward_model"),
}  # fmt: skip
ABSENT = {name: what for what, names in NOT_OFFERED.items() for name in names}
FAQ = "docs/faq.md"


def instead_of(name: str) -> str:
    """Return what to do instead of a flag or setting of another program, as a clause; '' if none of that name is known."""
    last = _plain(name).rpartition(".")[2]
    if last in ABSENT:
        return f"{ABSENT[last]} is not offered; see {FAQ}"
    return ADVICE.get(last, "")


def suggestion(name: str, settings: Collection[str], options: Iterable[str] = ()) -> str:
    """Return `` (did you mean 'optimizer.lr'?)`` for what is no setting or option, else ''.

    The last part of a setting's name tells more than the section, and the same name more than a similar one, for which
    only a section of that name is looked at.
    """
    plain = _plain(name)
    section, _, last = plain.rpartition(".")
    by_last: dict[str, list[str]] = {}
    for key in settings:
        by_last.setdefault(key.rpartition(".")[2], []).append(key)
    by_option = {f"--{_plain(option)}": [option] for option in options}
    found = by_option.get(f"--{plain}") or by_last.get(last) or [SETTINGS[key] for key in [last] if key in SETTINGS]
    if not found:
        near = difflib.get_close_matches(f"--{plain}", by_option, 1, LIKENESS) if plain == last else []
        found = [option for each in near for option in by_option[each]]
    if not found:
        within = [key for key in settings if key.startswith(f"{section}.")] or list(settings)
        near = difflib.get_close_matches(last, [key.rpartition(".")[2] for key in within], 1, LIKENESS)
        found = [key for key in within if key.rpartition(".")[2] in near]
    return given(" (did you mean {}?)", " or ".join(map(repr, found)))


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()
