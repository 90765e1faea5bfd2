"""The forked side of a call: the one request this process serves."""

from __future__ import annotations

import signal

from guest import file_reads, file_writes
from guest.failures import INTERNAL, Failure, describe_os_error
from guest.pipes import Watch
from guest.process_tree import KillReport, kill_below, reap
from guest.requests import ExecRequest, ReadFileRequest, ReadLinesRequest, WriteFileRequest
from guest.supervisor import Supervisor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.pipes import CallPipes
    from guest.places import Places
    from guest.requests import CallRequest


def serve_request(request: CallRequest, pipes: CallPipes, places: Places) -> None:
    """Serve one request in this process, and report its end."""
    try:
        pipes.close_others()
        if isinstance(request, ExecRequest):
            Supervisor(request, pipes, places).run()
        else:
            pipes.writer.send_done(_serve_file(request, pipes, places))
    except Failure as failure:
        _report_failure(failure, pipes)
    except OSError as error:
        _report_failure(describe_os_error(error, "the guest"), pipes)
    # The edge of this process: a bug in it must still answer the call, and leave nothing running.
    except Exception as error:  # noqa: BLE001
        _report_failure(Failure(INTERNAL, f"{type(error).__name__} in the guest"), pipes)


def _report_failure(failure: Failure, pipes: CallPipes) -> None:
    fields: dict[str, object] = {"error": failure.as_error()}
    if not reap():
        report = KillReport()
        kill_below(report)
        fields["kill"] = report.as_field()
    pipes.settle()
    pipes.writer.send_done(fields)


def _serve_file(
    request: ReadLinesRequest | ReadFileRequest | WriteFileRequest, pipes: CallPipes, places: Places
) -> dict[str, object]:
    # Beyond the file size limit a write is to fail, not to end this process.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    watch = Watch(pipes, request.timeout_s)
    if isinstance(request, ReadLinesRequest):
        return file_reads.read_lines(request, places, pipes.writer, watch)
    if isinstance(request, ReadFileRequest):
        return file_reads.read_file(request, places, pipes.writer, watch)
    return file_writes.write_file(request, places, pipes.body, watch)
