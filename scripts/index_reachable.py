"""Exits with 3 if none of pip's package indexes answers. pip itself would try for minutes, and then blame a package."""

from __future__ import annotations

import sys
import urllib.parse
from typing import Any

from pip._internal.commands import create_command
from pip._vendor.requests import RequestException

command: Any = create_command("install")
options, _ = command.parse_args(["--retries", "0"])
session = command._build_session(options, timeout=min(10, options.timeout))
failures = []
for url in command._build_package_finder(options, session).index_urls:
    if urllib.parse.urlsplit(url).scheme in ("http", "https"):
        try:
            session.head(url)
            sys.exit()
        except RequestException as error:
            cause: BaseException = error
            while cause.__context__:
                cause = cause.__context__
            failures.append(f"{urllib.parse.urlsplit(url).hostname} ({cause})")
if failures:
    print(f"no package index answers: {', '.join(failures)}", file=sys.stderr)
    print("    fix:  connect to the internet, or set pip's index-url or proxy; then run this again", file=sys.stderr)
    sys.exit(3)
