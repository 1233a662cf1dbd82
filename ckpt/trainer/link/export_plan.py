"""What a ckpt.Export means for the module that it names: which tensors, their names, and the files beside them.

Hugging Face's libraries are recognised by their objects and never imported here: a script with such an object has
imported the library.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from torch import nn

from ckpt.errors import UsageError
from ckpt.policy.export_rule import Export, compile_names
from ckpt.store import hub
from ckpt.store.dtypes import TARGET_DTYPES
from ckpt.trainer.state.names import sites, unwrap

BESIDE = ".beside"  # within the folder of exports: the files that are copied into each

# PEFT leaves the adapter's name out of the names in its file, and the wrapper of a module that is trained as a whole.
ADAPTER_NAMES = ((r"\.modules_to_save\.{}\.", "."), (r"\.{}(?=\.|$)", ""))


def plan_export(export: Export | None, state: dict[str, Any]) -> dict[str, Any] | None:
    """The export as plain values for the agent (see ExportRule). Errors: UsageError."""
    if export is None:
        return None
    if not isinstance(export, Export):
        raise UsageError(f"export={export!r}: a ckpt.Export(...)")
    module, prefix = _find_module(export, state), f"{export.of}."
    if export.dtype is not None and export.dtype not in TARGET_DTYPES:
        raise UsageError(f"ckpt.Export(dtype={export.dtype!r}): one of {', '.join(TARGET_DTYPES)}")
    names: list[list[str]] = []
    only, adapter = [_literal_glob(prefix) + "*"], adapter_of(module)
    if adapter:
        chosen, names = _adapter_names(module, adapter)
        only = [_literal_glob(prefix + each) for each in chosen]
    folder = _folder(export)
    return {
        "to": str(folder),
        "repository": export.repository,
        "every": export.every,
        "only": only,
        "strip": prefix,
        "names": [*names, *map(list, export.names.items())],
        "dtype": export.dtype,
        "format": "adapter" if adapter else "sharded",
        "beside": str(folder / BESIDE),
    }


def write_companions(export: Export, state: dict[str, Any]) -> None:
    """Writes the files that go beside each export: the module's own config, and what `beside` names. Called on rank 0.

    Errors: UsageError, also if the repository of the Hub cannot be written to."""
    from ckpt.store.export import copy_companions, find_companions

    if export.repository:
        hub.check_repository(export.repository)
    module, folder = _find_module(export, state), _folder(export) / BESIDE
    fresh = folder.with_name(f"{BESIDE}.{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        fresh.mkdir(parents=True)
        for each in [*_configs(module, export.dtype), *export.beside]:
            if callable(save := getattr(each, "save_pretrained", None)):
                save(str(fresh))
            elif isinstance(each, str | os.PathLike):
                copy_companions(find_companions([each]), fresh)
            else:
                raise UsageError(
                    f"ckpt.Export(beside=) has {type(each).__name__}: give paths, and objects with save_pretrained()"
                )
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    except OSError as exc:
        raise UsageError(f"ckpt.Export(to={str(export.to)!r}): {exc}") from exc
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def adapter_of(module: nn.Module) -> str:
    """The name of the active adapter of a PEFT model; "" for any other module."""
    active = getattr(module, "active_adapter", None) if isinstance(getattr(module, "peft_config", None), dict) else None
    return active if isinstance(active, str) else ""


def _folder(export: Export) -> Path:
    return hub.folder_of(export.repository) if export.repository else Path(export.to).absolute()


def _find_module(export: Export, state: dict[str, Any]) -> nn.Module:
    module = state.get(export.of)
    if not isinstance(module, nn.Module):
        known = ", ".join(key for key, each in state.items() if isinstance(each, nn.Module))
        raise UsageError(
            f"ckpt.Export(of={export.of!r}): no module of that key is in the state; it has {known or 'none'}"
        )
    return unwrap(module)


def _adapter_names(module: nn.Module, adapter: str) -> tuple[list[str], list[list[str]]]:
    """The names of the adapter's tensors, and the expressions that make PEFT's names of them. Errors: UsageError if
    PEFT would name them otherwise."""
    given = {site.name: site.tensor for site in sites(module)}
    wanted: dict[str, Any] = sys.modules["peft"].get_peft_model_state_dict(
        module, state_dict=dict(given), adapter_name=adapter, save_embedding_layers=False
    )
    patterns = [(pattern.format(re.escape(adapter)), new) for pattern, new in ADAPTER_NAMES]
    found = {}
    for name in given:
        short = name
        for pattern, new in compile_names(patterns):
            short = pattern.sub(new, short)
        if short in wanted and wanted[short] is given[name]:
            found[name] = short
    if len(found) != len(wanted):
        kind = type(_adapter_config(module, adapter)).__name__
        raise UsageError(
            f"ckpt.Export cannot write the adapter of a {kind}: PEFT makes its tensors only when it saves. Leave "
            "export= out, and call save_pretrained() after training"
        )
    used = [[*each] for each in patterns if any(re.search(each[0], name) for name in found)]
    return list(found), used


def _configs(module: nn.Module, dtype: str | None) -> list[Any]:
    """The objects of the module whose save_pretrained() writes what its weights need beside them."""
    if adapter := adapter_of(module):
        adapter_config = copy.copy(_adapter_config(module, adapter))
        adapter_config.inference_mode = True  # as PEFT's own save
        return [adapter_config]
    config: Any = copy.deepcopy(getattr(module, "config", None))
    if not callable(getattr(config, "save_pretrained", None)):
        return []
    # As Hugging Face's own save: the class to load, and the dtype to load it in. fully_shard makes a class FSDPName.
    config.architectures = [
        next(each.__name__ for each in type(module).__mro__ if not each.__name__.startswith("FSDP"))
    ]
    config.dtype = dtype or str(next((each.dtype for each in module.parameters()), "")).removeprefix("torch.") or None
    generation = getattr(module, "generation_config", None)
    return [config, *([generation] if callable(getattr(generation, "save_pretrained", None)) else [])]


def _adapter_config(module: Any, adapter: str) -> Any:
    return module.peft_config[adapter]


def _literal_glob(text: str) -> str:
    """A glob that matches this text alone."""
    return re.sub(r"([*?[])", r"[\1]", text)
