"""Loading of model folders from other sources. Pickles are never read, and Python code runs only where the caller
allows it; both are refused in one line."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils.peft_utils import find_adapter_config_file

from rlhf_core.errors import UserError

os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "true")
"""transformers would load weights without safetensors from a pull request on the hub, which is another revision."""


@contextmanager
def loading(path: str | Path) -> Iterator[None]:
    """Turns errors of transformers about a folder into a UserError of one line."""
    try:
        yield
    except SafetensorError as error:
        raise UserError(f"{path}: a safetensors file is damaged ({error}); make it or download it again") from None
    except ImportError as error:
        raise UserError(f"{path}: needs a package that is not installed ({_line(error)})") from None
    except RuntimeError as error:  # without the names, which are only logged
        if "conversion of the weights" not in str(error):
            raise
        raise UserError(
            f"{path}: the weights of the experts do not fit together: one is missing or has another shape; save the "
            "whole model with save_pretrained"
        ) from None
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise UserError(
                f"{path}: brings Python code of its own, which would run with your rights; read it, then set "
                "trust_remote_code: true in params.yaml, or choose a model that transformers supports"
            ) from None
        if isinstance(error, OSError) and "model.safetensors" in str(error):
            raise UserError(
                f"{path}: no model.safetensors; pickled weights (pytorch_model.bin) are never loaded, because a pickle "
                "can run any program: convert them to safetensors elsewhere, or choose a revision that has them"
            ) from None
        if isinstance(error, OSError) and (part := re.search(r"[^/\s'\"]+\.safetensors\b(?!\.index)", str(error))):
            raise UserError(
                f"{path}: {part[0]} is missing, which its index of weights names; copy or download the model again"
            ) from None
        raise


def load_config(
    path: str | Path, revision: str | None = None, trust_remote_code: bool = False, **changes: object
) -> PreTrainedConfig:
    """The settings of a model folder or hub id, with changes. Raises UserError for an adapter, for code of another
    repository, and for a kernel of the hub."""
    if find_adapter_config_file(str(path), revision=revision) is not None:
        raise UserError(
            f"{path}: holds an adapter, not a model; merge it into its base model (peft: merge_and_unload), save that, "
            "and name it here"
        )
    if trust_remote_code:
        _refuse_code_from_elsewhere(path, revision)
    config = AutoConfig.from_pretrained(str(path), revision=revision, trust_remote_code=trust_remote_code, **changes)
    kernel = str(getattr(config, "_attn_implementation", None) or "")
    if "/" in kernel and not trust_remote_code:
        raise UserError(f"{path}: config.json names the attention kernel {kernel}, which is code of the hub; remove it")
    return config


def _refuse_code_from_elsewhere(path: str | Path, revision: str | None) -> None:
    """`owner/name--module.Class` is code of another repository; no revision pins it."""
    content, _ = PreTrainedConfig.get_config_dict(str(path), revision=revision)
    places = [place for place in dict(content.get("auto_map") or {}).values() if "--" in str(place)]
    if places:
        raise UserError(
            f"{path}: config.json takes code from elsewhere ({places[0]}); put that code beside config.json"
        )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
