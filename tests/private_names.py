"""The private names of torch that the memory plan uses. A run needs none of them: where one is missing, it goes on
without its plan (train.plan_run), and --dry_run ends with an error that names it.

    python tests/private_names.py       # prints what the installed torch lacks, and what to do

.ci/run prints it, too. test_private_names.py takes each one away."""

import contextlib
import pkgutil
from typing import NamedTuple

C10D = "torch.distributed.distributed_c10d"
FSDP2 = "torch.distributed.fsdp._fully_shard"
MODE = "torch.utils._python_dispatch.TorchDispatchMode"
GROUPS = "find where torch keeps its process groups"


class Name(NamedTuple):
    place: str  # a module or a class
    name: str
    if_missing: str  # what somebody who mends the plan does
    is_needed: bool = True  # for a trace; without the others it is slower


NAMES = [
    # train.kernels_on_paper(): a step on the meta device
    Name("torch.utils._python_dispatch", "TorchDispatchMode", "find the mode that sees all operators"),
    Name(MODE, "_should_skip_dynamo", "leave it out: plans are a tenth slower", is_needed=False),
    Name("torch._ops.OpOverload", "_opname", "find the name of an operator"),
    Name("torch._ops.OpOverload", "_schema", "find whether an operator writes to its argument"),
    Name("torch._C", "_storage_Use_Count",
         "let train.n_holders() return 2: all sums of gradients are in place, plans with --tiled_mlp 1.5 to 3 % low"),
    # train.ranks_on_paper(): a process group whose other ranks are not there
    Name("torch.testing._internal.distributed.fake_pg", "FakeStore", "find the backend that sends nothing"),
    Name(C10D, "_world", "find where init_process_group() puts what it makes"),
    Name(C10D, "_World", "the class of _world"),
    Name(C10D, "_pg_map", GROUPS),
    Name(C10D, "_pg_names", GROUPS),
    Name(C10D, "_pg_group_ranks", GROUPS),
    Name(C10D, "_pg_backend_config", GROUPS),
    Name(C10D, "_pg_to_tag", GROUPS),
    Name(C10D, "_tags_to_pg", GROUPS),
    Name(C10D, "_group_count", "find what numbers the groups"),
    Name("torch._C._distributed_c10d", "_set_global_rank", "leave it out: it is for log lines"),
    Name("torch._C._distributed_c10d", "_register_process_group", GROUPS),
    Name("torch._C._distributed_c10d", "_unregister_process_group", GROUPS),
    # FSDP2 on the meta device. torch.meta, which it asks for streams, is train.TORCH_META.
    Name(f"{FSDP2}._fsdp_param", "FSDPParam", "find the class of a sharded parameter"),
    Name(f"{FSDP2}._fsdp_param.FSDPParam", "reset_sharded_param", "find what pins parameters"),
    Name(f"{FSDP2}._fsdp_param.FSDPParam", "pin_memory", "find whether a parameter is pinned"),
    Name(f"{FSDP2}._fsdp_param.FSDPParam", "sharded_param", "find a rank's rows of a parameter"),
    Name(f"{FSDP2}._fsdp_param_group", "FSDPParamGroup", "find the class of a unit"),
    Name(f"{FSDP2}._fsdp_param_group.FSDPParamGroup", "_validate_no_meta_params",
         "find what refuses parameters on the meta device"),
    Name(f"{FSDP2}._fsdp_param_group.FSDPParamGroup", "_validate_cpu_offload_params",
         "find what refuses parameters that are not on the CPU with --offload params"),
]
OF_OBJECTS = "_opname", "_schema", "pin_memory", "sharded_param"  # each object has them, and not their class


@contextlib.contextmanager
def gone(entry):
    """A context in which torch does not have a name."""
    place = pkgutil.resolve_name(entry.place)

    def raises(*_):
        raise AttributeError(f"torch has no {entry.name}")

    if entry.name in OF_OBJECTS:
        original = vars(place).get(entry.name)
        setattr(place, entry.name, property(raises, raises))
    else:
        original = getattr(place, entry.name)
        delattr(place, entry.name)
    try:
        yield
    finally:
        if original is not None:
            setattr(place, entry.name, original)
        else:
            delattr(place, entry.name)


def is_there(entry):
    try:
        place = pkgutil.resolve_name(entry.place)
    except (ImportError, AttributeError):
        return False
    return entry.name in OF_OBJECTS or hasattr(place, entry.name)


if __name__ == "__main__":
    import torch

    missing = [entry for entry in NAMES if not is_there(entry)]
    for entry in missing:
        print(f"torch {torch.__version__} has no {entry.place}.{entry.name}: {entry.if_missing}")
    print(f"torch {torch.__version__}: {len(NAMES) - len(missing)} of {len(NAMES)} private names of the plan are there")
