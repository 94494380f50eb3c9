"""What TransferQueue has and redrb's has not: it can be imported, and says so at the call."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

from redrb.errors import ConfigError

ABSENT = {
    "": "StreamingDataset StreamingDataLoader BaseSampler SequentialSampler GRPOGroupNSampler "
    "RankAwareSampler SeqlenBalancedSampler",
    "TransferQueueClient": "put get_data get_meta async_get_meta set_custom_meta "
    "async_set_custom_meta clear_samples async_clear_samples clear_partition "
    "async_clear_partition kv_list async_kv_list kv_retrieve_meta kv_retrieve_keys "
    "get_partition_list async_get_partition_list check_consumption_status "
    "async_check_consumption_status check_production_status async_check_production_status "
    "get_consumption_status get_production_status reset_consumption async_reset_consumption "
    "initialize_storage_manager close",
    "BatchMeta": "add_fields union reorder chunk_by_partition get_dtypes get_shapes "
    "get_extra_info set_extra_info get_all_extra_info update_extra_info remove_extra_info "
    "clear_extra_info has_extra_info get_all_custom_meta update_custom_meta clear_custom_meta",
}
"""Methods by class; under "", the classes of the package itself."""


class Absent:
    """Base of a class that has some of the methods of TransferQueue's: the others refuse."""

    def __init_subclass__(cls) -> None:
        for name in ABSENT.get(cls.__name__, "").split():
            setattr(cls, name, _refusal(f"{cls.__name__}.{name}"))


def __getattr__(name: str) -> type:
    """Return a class that can be derived from, and whose objects cannot be made."""
    if name not in ABSENT[""].split():
        raise AttributeError(name)
    return _absent_class(name)


@cache
def _absent_class(name: str) -> type:
    return type(name, (), {"__init__": _refusal(name), "__doc__": f"redrb has no {name}."})


def _refusal(name: str) -> Callable[..., NoReturn]:
    """Return a function that says at the call that redrb has no such thing."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            f"redrb has no transfer_queue.{name}. It has the functions kv_*, init, close, "
            "get_client with the methods that verl calls, save_checkpoint and load_checkpoint: "
            "docs/how-to/verl.md. With REDRB_TRANSFER_QUEUE unset the process uses TransferQueue "
            "itself."
        )

    return refuse
