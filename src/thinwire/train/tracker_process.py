"""A tracker's own process: objects that come on stdin, one a line, go to TensorBoard, wandb or trackio.

train/trackers.py starts it as `python -m thinwire.train.tracker_process`. First line: what the run is
(`start` below); then the numbers of a step; last {"finish": STATUS}. Without that line the run was killed.
On stdout: {"where": PLACE} once the tracker has begun, then {"finished": true} or {"failed": REASON}.
What a tracker itself prints goes to stderr, a log file. Loads neither torch nor pydantic.

A line that takes too long ends the process: an alarm of the kernel, which needs no interpreter and no
parent to fire, so that neither a call that holds the interpreter's lock nor a killed run leaves it behind.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn


class Sink(NamedTuple):
    """A tracker that has begun."""

    log: Callable[[Mapping[str, float]], object]
    """Takes the numbers of a step, with the step under "step"."""
    finish: Callable[[str], object]
    """Ends it with the run's status: done, interrupted or failed. All of it is kept when this returns."""
    where: str
    """An address or folder to look at, "" for none worth a line."""


def main() -> NoReturn:
    """Serve one tracker until its stdin ends. Leaves by os._exit: an exit handler could wait for a server."""
    lines, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def reply(value: Mapping[str, Any]) -> None:
        with suppress(OSError):  # the run was killed
            print(json.dumps(value), file=replies, flush=True)

    exit_status = 1
    try:
        _serve(lines, reply)
        exit_status = 0
    except BaseException as error:  # whatever it was, the run hears of it; sys.exit too
        text = " ".join(str(error).split())
        reply({"failed": f"{type(error).__name__}: {text}" if text else type(error).__name__})
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(exit_status)


def _serve(lines: Iterator[str], reply: Callable[[Mapping[str, Any]], None]) -> None:
    start = json.loads(next(lines))
    with _at_most(start["start_seconds"]):
        sink = SINKS[start["tracker"]](start)
    reply({"where": sink.where})
    status = "failed"
    for line in lines:
        if not line.endswith("\n"):  # the run was killed within it
            break
        row = json.loads(line)
        if "finish" in row:
            status = row["finish"]
            break
        with _at_most(start["line_seconds"]):
            sink.log(row)
    with _at_most(start["line_seconds"]):
        sink.finish(status)
    reply({"finished": True})


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    """SIGALRM ends the process where the block takes longer; set anew each time, for a tracker may have
    taken the signal for itself."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def _tensorboard(start: Mapping[str, Any]) -> Sink:
    """Event files below RUN/tensorboard, values rounded to fp32: TensorBoard's own default loader shows no
    fp64 series (measured with 2.21).

    Written with the tensorboard package alone: through torch the process took 220 MB and 1.5 s of the
    processor to begin, this way 40 MB and 0.3 s. The session mark makes TensorBoard drop the steps that a
    resumed run takes again.
    """
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(Path(start["folder"]) / "tensorboard"))

    def add(step: int, **content: Any) -> None:
        writer.add_event(Event(wall_time=time.time(), step=step, **content))
        writer.flush()

    def log(row: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=tag, simple_value=x) for tag, x in row.items() if tag != "step"]
        add(int(row["step"]), summary=Summary(value=values))

    add(start["first_step"], session_log=SessionLog(status=SessionLog.START))
    config = "\n".join(f"    {line}" for line in json.dumps(start["config"], indent=1).splitlines())
    text = TensorProto(dtype="DT_STRING", string_val=[config.encode()])  # Markdown: a block of code
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    value = Summary.Value(tag="config", tensor=text, metadata=metadata)
    add(start["first_step"], summary=Summary(value=[value]))
    return Sink(log, lambda status: writer.close(), "")


def _wandb(start: Mapping[str, Any]) -> Sink:
    """Files below RUN/wandb. The x axis is our "step": wandb's own step may not go back, as it must where a
    resumed run takes steps again."""
    os.environ.setdefault("WANDB_CONSOLE", "off")  # nothing of the run is printed here
    import wandb

    run = wandb.init(
        project=start["project"],
        group=start["group"] or None,
        name=start["name"],
        id=start["id"],
        resume="allow",
        dir=start["folder"],
        config=start["config"],
        mode=start["mode"],
    )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")

    def finish(status: str) -> None:
        run.finish(exit_code=0 if status == "done" else 1)

    offline = f"{Path(run.dir).parent} (upload it with wandb sync)"
    return Sink(run.log, finish, getattr(run, "url", None) or offline)


def _trackio(start: Mapping[str, Any]) -> Sink:
    """Where trackio keeps its projects (TRACKIO_DIR). It knows runs by name, so the name holds the id."""
    import trackio

    trackio.init(
        project=start["project"],
        group=start["group"] or None,
        name=f"{start['name']}-{start['id']}",
        config=start["config"],
        resume="allow",
        embed=False,
    )

    def log(row: Mapping[str, float]) -> None:
        trackio.log({name: value for name, value in row.items() if name != "step"}, step=int(row["step"]))

    return Sink(log, lambda status: trackio.finish(), "")


SINKS: dict[str, Callable[[Mapping[str, Any]], Sink]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
}

if __name__ == "__main__":
    main()
