"""llama.cpp's own HTTP server as one process: `python -m benchkit.llamacpp.serve MODEL.gguf`.

Prints `READY http://127.0.0.1:PORT` on stdout once the model answers; the server's log goes to stderr.
Ends with exit code 0 on SIGTERM or SIGINT, at once and whatever is in flight; 2 where it cannot start.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn


@contextmanager
def running_server(
    model: Path,
    *,
    alias: str = "",
    ctx: int = 16384,
    slots: int = 8,
    threads: int = 2,
    ngram: bool = False,
    ping_s: int = 30,
    key: str = "",
    ready_timeout_s: float = 60,
) -> Iterator[str]:
    """Runs the server in a process of its own and yields its base URL (no /v1); ends it on the way out.

    `alias` is the model id it tells ("" = the file's name), `ctx` tokens of context are shared out evenly
    among the slots, and with `ngram` it speculates from n-grams of the context. Its threads wait for each
    other by polling: where other work shares the cores, one thread is slower and never comes to a standstill.
    Raises RuntimeError with the end of the server's log if it ends before it is ready or is not ready in time.
    """
    command = [sys.executable, "-m", "benchkit.llamacpp.serve", str(model), f"--ctx={ctx}", f"--slots={slots}"]
    command += [f"--threads={threads}", f"--ping={ping_s}", f"--alias={alias}", f"--key={key}"]
    command += ["--ngram"] if ngram else []
    # A file, and not a pipe: nobody reads along, and a full pipe would stop the server.
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        expired = threading.Event()

        def give_up() -> None:
            expired.set()
            process.kill()

        late = threading.Timer(ready_timeout_s, give_up)
        try:
            late.start()
            assert process.stdout is not None
            announced = process.stdout.readline()
            late.cancel()
            if not announced.startswith("READY "):
                code = process.wait()
                log.seek(0)
                tail = " | ".join(log.read().decode(errors="replace").splitlines()[-5:]) or "it said nothing"
                why = f"not ready within {ready_timeout_s:g} s" if expired.is_set() else f"exit code {code}"
                raise RuntimeError(f"llama.cpp server for {model}: {why}: {tail}")
            yield announced.removeprefix("READY ").strip()
        finally:
            late.cancel()
            process.terminate()
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Serves one model until a signal comes; never returns."""
    parser = argparse.ArgumentParser(
        prog="python -m benchkit.llamacpp.serve", description="Serves one GGUF with llama.cpp's own HTTP server."
    )
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one (default)")
    parser.add_argument("--alias", default="", help="the model id that it tells (default: the file's name)")
    parser.add_argument("--ctx", type=int, default=16384, help="tokens of context, shared out among the slots")
    parser.add_argument("--slots", type=int, default=8, help="requests that it works on at once")
    parser.add_argument("--threads", type=int, default=2, help="they poll while they wait: no more than free cores")
    parser.add_argument("--ngram", action="store_true", help="speculate from n-grams of the context")
    parser.add_argument("--ping", type=int, default=30, metavar="S", help="seconds of silence before a comment line")
    parser.add_argument("--key", default="", help="the API key it asks for")
    args = parser.parse_args(argv)
    if not args.model.is_file():
        _fail(f"{args.model}: no such file")

    # Blocked before the server starts its threads, so that they inherit it: whichever of them the kernel
    # picked for a SIGTERM would otherwise end the process with that signal.
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    try:
        import xllamacpp
    except ModuleNotFoundError:
        _fail("llama.cpp's server is not installed; install benchkit[llamacpp]")

    params = xllamacpp.CommonParams()
    params.model.path = str(args.model)
    params.model_alias = {args.alias or args.model.stem}
    params.port = args.port
    params.n_ctx, params.n_parallel = args.ctx, args.slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    params.endpoint_metrics = params.endpoint_props = params.endpoint_slots = True
    params.ui = False
    params.sse_ping_interval = args.ping
    if args.key:
        params.api_keys = [args.key]
    if args.ngram:
        kind = xllamacpp.common_speculative_type
        params.speculative.types = [kind.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        # Three tokens seen before predict the four that followed: short enough to hit in small models' loops.
        params.speculative.ngram_simple.size_n, params.speculative.ngram_simple.size_m = 3, 4
    try:
        server = xllamacpp.Server(params)
    except Exception as error:  # whatever C++ threw; one line says it better than a traceback
        _fail(f"{args.model}: llama.cpp could not serve it: {error}")
    print("READY", server.listening_address, flush=True)
    signal.sigwait(ends)
    # Its destructor waits for the streams in flight. They are lost either way.
    os._exit(0)


def _fail(message: str) -> NoReturn:
    print(message, file=sys.stderr, flush=True)
    # Not sys.exit: a half-started server's threads would be waited for.
    os._exit(2)


if __name__ == "__main__":
    main()
