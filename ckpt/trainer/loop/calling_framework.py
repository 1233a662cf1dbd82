"""Whether the block is entered inside a framework's own loop, whose counters and loaders the state lacks.

A transformers Trainer and a Lightning Trainer count steps and epochs, and draw from loaders, that a plain callback does
not see. A restart then begins the framework's loop anew, from the restored weights. The same holds for what an
Accelerator has prepared.

Only modules that are imported already are looked at, so nothing is imported here.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from torch import nn

from ckpt.events import Events
from ckpt.trainer.state import value_trees

INTEGRATIONS = "ckpt.integrations."
ACCELERATOR = "accelerate.accelerator"
LIGHTNING = "a Lightning Trainer", "fit_loop", "ckpt.integrations.lightning.Checkpoint(url)", "lightning"
HUGGING_FACE = "a transformers Trainer", "global_step", "ckpt.integrations.hf.Callback(url)", "huggingface"
TRAINERS = (
    ("transformers.trainer", *HUGGING_FACE),
    ("lightning.pytorch.trainer.trainer", *LIGHTNING),
    ("pytorch_lightning.trainer.trainer", *LIGHTNING),
)


def report_unsaved(state: Mapping[str, Any], events: Events) -> None:
    """Emits one warning (`framework.unsaved`) if a framework's loop runs this thread and `state` lacks what that loop
    counts. Silent inside an integration of ckpt, which has put it into the state."""
    if not any(module in sys.modules for module in (ACCELERATOR, *(each[0] for each in TRAINERS))):
        return
    running = list(_frames())
    if any(module.startswith(INTEGRATIONS) for module, _ in running):
        return
    frames = [local for _, local in running]
    held = list(_objects(state, 0))
    for module, name, key, way, guide in TRAINERS:
        trainer = _find_self(frames, _class(module, "Trainer"))
        if trainer is not None:
            own = getattr(trainer, "state" if key == "global_step" else key, None)
            if not any(each is own or each is trainer or (isinstance(each, dict) and key in each) for each in held):
                _report(events, name, "its counts of steps and epochs, and the position of its data", way, guide)
            return
    accelerator = _find_accelerator(frames, _class(ACCELERATOR, "Accelerator"))
    if accelerator is not None and (missing := _find_missing(accelerator, held)):
        way = "ckpt.integrations.accelerate.attach(accelerator, url)"
        _report(events, "an Accelerator", f"what it has prepared: {', '.join(missing)}", way, "accelerate")


def _report(events: Events, name: str, what: str, way: str, guide: str) -> None:
    events.emit(
        "framework.unsaved",
        f"ckpt: the block is entered inside the loop of {name}, and the state lacks {what}. A restart begins these "
        f"anew. Use {way} instead (docs/guides/{guide}.md)",
        loud=True,
        framework=name,
    )


def _frames() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The module and the local variables of each running function, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield str(frame.f_globals.get("__name__", "")), _read_locals(frame)
        frame = frame.f_back


def _read_locals(frame: FrameType) -> Mapping[str, Any]:
    """A copy of the function's local variables. Before Python 3.13 the frame keeps the dict that it gives, and with it
    whatever the function lets go of later, such as a loader's workers. So it is emptied, unless a script has it from
    locals()."""
    given = frame.f_locals
    found = dict(given)
    holders = 3  # the frame, `given`, and the argument of getrefcount
    is_ours = frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.getrefcount(given) <= holders
    if sys.version_info < (3, 13) and is_ours:
        given.clear()
    return found


def _class(module: str, name: str) -> type | tuple[()]:
    """The class, if its module is imported; else no class."""
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else ()


def _find_self(frames: Sequence[Mapping[str, Any]], kind: type | tuple[()]) -> Any:
    """The object of this kind whose method is running."""
    return next((each for local in frames if isinstance(each := local.get("self"), kind)), None)


def _find_accelerator(frames: Sequence[Mapping[str, Any]], kind: type | tuple[()]) -> Any:
    """The accelerator that a running function has, or the object whose method it is."""
    for local in frames:
        held = [*local.values(), *getattr(local.get("self"), "__dict__", {}).values()]
        if (found := next((each for each in held if isinstance(each, kind)), None)) is not None:
            return found
    return None


def _find_missing(accelerator: Any, held: list[Any]) -> list[str]:
    """What the accelerator has prepared and the state lacks, by kind. Any loader in the state is enough: the others may
    be those of evaluations."""
    known = {id(each) for each in held}
    found: dict[str, list[bool]] = {}
    wrapped = {"model": "module", "optimizer": "optimizer", "scheduler": "scheduler", "custom_object": ""}
    for kind, inner in wrapped.items():
        prepared = getattr(accelerator, f"_{kind}s", ())
        found[kind] = [id(each) in known or id(getattr(each, inner, None)) in known for each in prepared]
    if not any(found["model"]):
        # The state has nothing of this accelerator: another loop is saved.
        return []
    missing = [
        f"{kind.replace('custom', 'registered').replace('_', ' ')}s" for kind, saved in found.items() if not all(saved)
    ]
    # nn.Sequential can be iterated over, too.
    has_loader = any(
        hasattr(each, "state_dict") and hasattr(each, "__iter__") for each in held if not isinstance(each, nn.Module)
    )
    return missing + (["the loaders' positions"] if accelerator._dataloaders and not has_loader else [])


def _objects(value: Any, depth: int) -> Iterator[Any]:
    """The objects in the state, and the dicts."""
    if isinstance(value, (dict, list, tuple)):
        yield value
        if depth < value_trees.DEPTH_MAX:
            for each in value.values() if isinstance(value, dict) else value:
                yield from _objects(each, depth + 1)
    elif type(value) not in value_trees.PLAIN:
        yield value
