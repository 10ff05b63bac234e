"""TensorBoard event files, through the tensorboard package (extra `tensorboard`)."""

from pathlib import Path

from thinwire.core.errors import UserError
from thinwire.reports.formats import Log

EVENT_FILES = "*tfevents*"


def event_folders(folder: Path) -> list[Path]:
    """Folders at or below `folder` that hold event files."""
    return sorted({file.parent for file in folder.rglob(EVENT_FILES) if file.is_file()})


def read_events(folder: Path) -> Log:
    """Every scalar of one folder's event files; later files follow earlier ones (resumed runs)."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator
        from tensorboard.util import tensor_util
    except ImportError as error:
        raise UserError(
            f"{folder} holds TensorBoard event files, which need the package tensorboard; "
            "pip install 'thinwire[tensorboard]'"
        ) from error
    log = Log(folder.name)
    events = EventAccumulator(
        str(folder), size_guidance={"scalars": 0, TENSORS: 0}, purge_orphaned_data=False
    )
    events.Reload()
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            log.readings.add(int(event.step), tag, float(event.value))
    for tag in events.Tags()[TENSORS]:
        for event in events.Tensors(tag):
            value = tensor_util.make_ndarray(event.tensor_proto)
            if value.size == 1 and value.dtype.kind in "fiu":
                log.readings.add(int(event.step), tag, float(value.reshape(-1)[0]))
    return log
