"""Where the model that ships inside the package lies."""

from importlib import resources
from pathlib import Path

from thinwire.core.errors import UserError

EMBEDDED = "embedded"


def embedded_model_path() -> Path:
    """The folder of the embedded tiny model: safetensors weights, config.json and a tokenizer.

    transformers needs a real folder, so a package imported from inside a zip archive is refused.
    """
    folder = Path(str(resources.files("thinwire.models").joinpath("tiny")))
    if not (folder / "config.json").is_file():
        raise UserError(
            f"model.path={EMBEDDED!r} needs the folder {folder}, which this installation lacks; "
            "install thinwire from a wheel or a checkout, or set model.path to a model folder"
        )
    return folder
