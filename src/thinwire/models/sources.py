"""What `model.path` means: the embedded model, a folder, a hub id, a GGUF file or one inside a package."""

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from thinwire.core.errors import UserError
from thinwire.models.assets import EMBEDDED, embedded_model_path

PACKAGE_PREFIX = "package:"
WAYS_OUT = f"set model.path to {EMBEDDED!r}, a model folder, a hub id, a .gguf file or package:NAME"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Source:
    """Where a model is read from: a folder or a hub id, and the name of a GGUF file inside the folder."""

    location: str
    gguf_file: str | None = None

    @property
    def name(self) -> str:
        return str(Path(self.location, self.gguf_file)) if self.gguf_file else self.location

    @property
    def arguments(self) -> dict[str, str]:
        """What from_pretrained of a configuration or a tokenizer needs besides `location`."""
        return {"gguf_file": self.gguf_file} if self.gguf_file else {}


def resolve_source(path: str) -> Source:
    """The source that `path` names; a local one exists, a hub id is only well formed."""
    if path == EMBEDDED:
        return Source(str(embedded_model_path()))
    if path.startswith(PACKAGE_PREFIX):
        return _package_gguf(path)
    file = Path(path).expanduser()
    if file.suffix.lower() == ".gguf":
        if not file.is_file():
            raise UserError(f"model.path={path!r} is not a file; {WAYS_OUT}")
        return _gguf_source(file)
    if file.is_dir():
        return Source(str(file))
    if not _HUB_ID.fullmatch(path):
        raise UserError(f"model.path={path!r} is not a folder; {WAYS_OUT}")
    return Source(path)


def _package_gguf(path: str) -> Source:
    """The only .gguf file inside an installed package, found without importing the package."""
    name = path.removeprefix(PACKAGE_PREFIX).replace("-", "_")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None:
        raise UserError(f"model.path={path!r}: no Python package {name!r} is installed; {WAYS_OUT}")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = sorted(file for folder in folders for file in folder.rglob("*.gguf"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise UserError(
            f"model.path={path!r} needs one .gguf file inside the package {name!r}, found {found}; "
            "set model.path to the .gguf file itself"
        )
    return _gguf_source(files[0])


def _gguf_source(file: Path) -> Source:
    if importlib.util.find_spec("gguf") is None:
        raise UserError(
            f"model.path={file.name!r} needs the package gguf; "
            "install the extra: pip install 'thinwire[gguf]'"
        )
    return Source(str(file.parent), file.name)


def refuse_missing_weights(source: Source, path: str) -> None:
    """A local folder must hold a configuration and safetensors weights; a hub id is checked on loading."""
    folder = Path(source.location)
    if source.gguf_file or not folder.is_dir() or any(folder.glob("*.safetensors")):
        return
    if not (folder / "config.json").is_file():
        raise UserError(f"model.path={path!r} holds no config.json, so it is not a model folder; {WAYS_OUT}")
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    if pickles:
        raise UserError(
            f"model.path={path!r} holds pickle weights only ({pickles[0]}), which can run code when read; "
            "save the model once as safetensors (save_pretrained) where you trust it"
        )
    raise UserError(
        f"model.path={path!r} holds no *.safetensors weights; complete the folder or use train --check"
    )


@contextmanager
def as_user_errors(path: str) -> Iterator[None]:
    """What transformers raises for a wrong path, an unreachable hub or a broken file, as one UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of any kind: transformers checks little of what a foreign file holds
        reason = " ".join(str(error).split())[:200]
        local = path == EMBEDDED or path.startswith(PACKAGE_PREFIX) or Path(path).expanduser().exists()
        hint = "" if local else "; there is no such folder, and a hub id needs a network or a filled cache"
        raise UserError(f"model.path={path!r} cannot be loaded: {reason}{hint}; {WAYS_OUT}") from error
