"""Command `npu-vlrl view`."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path

from npu_vlrl.commands.options import Commands
from npu_vlrl.config import ConfigError


def add(commands: Commands) -> None:
    view = commands.add_parser("view", help="show the trajectories of a run in a browser")
    view.add_argument("folder", metavar="RUN", help="run folder")
    view.add_argument("--out", metavar="FILE", help="the page to write; RUN/view.html if not given")
    view.add_argument(
        "--serve", action="store_true", help="serve the page on this machine instead, while the run goes on"
    )
    view.add_argument("--port", type=int, default=0, metavar="N", help="with --serve; a free one if not given")
    view.set_defaults(run=_view)


def _view(options: argparse.Namespace) -> None:
    from npu_vlrl.report.view.page import write_page
    from npu_vlrl.report.view.records import RunRecords
    from npu_vlrl.report.view.serve import ViewServer

    folder = Path(options.folder)
    if options.serve and options.out is not None:
        raise ConfigError("--out writes a page and --serve serves one; give one of them")
    if not options.serve and options.port:
        raise ConfigError("--port is for --serve")
    records = RunRecords(folder)
    if options.serve:
        try:
            server = ViewServer(records, options.port)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--port: {options.port} cannot be used: {error}") from error
        with server, suppress(KeyboardInterrupt):
            print(f"{server.url}\nCtrl-C ends it", flush=True)
            server.serve_forever()
        return
    file = folder / "view.html" if options.out is None else Path(options.out)
    try:
        size = write_page(records, file)
    except OSError as error:
        raise ConfigError(f"--out: {error}") from error
    print(f"{file}: {len(records.rows)} trajectories, {size / 2**20:.1f} MiB; open it in a browser")
