"""An S3 server for tests, which checks signatures, expiry and hashes as the real ones do: OpenStack Swift with its S3
interface, all of it in this process, objects in memory.

    python tests/s3_server.py FOLDER      its port on the first line, then every request: verb, path, status, presigned
"""

from __future__ import annotations

import eventlet

eventlet.monkey_patch()  # before whatever else is imported
# ruff: noqa: E402

import sys
from pathlib import Path
from typing import Any

from eventlet import wsgi
from s3_server_key import SECRET
from swift.account.server import AccountController
from swift.common import utils
from swift.common.middleware import catch_errors, gatekeeper, listing_formats, tempauth
from swift.common.middleware.s3api import s3api
from swift.common.ring import RingBuilder
from swift.container.server import ContainerController
from swift.obj.mem_server import ObjectController
from swift.proxy.server import Application


def told(app: Any) -> Any:
    def serve(env: dict[str, Any], start: Any) -> Any:
        verb, path = env["REQUEST_METHOD"], env["PATH_INFO"]  # they are changed on the way
        presigned = "X-Amz-Signature=" in env.get("QUERY_STRING", "")

        def started(status: str, *rest: Any) -> Any:
            print(verb, path, status.split()[0], int(presigned), flush=True)
            return start(status, *rest)

        return app(env, started)

    return serve


def main(folder: Path) -> None:
    servers = {"account": AccountController, "container": ContainerController, "object": ObjectController}
    (folder / "disk").mkdir(parents=True)
    (folder / "swift.conf").write_text("[swift-hash]\nswift_hash_path_suffix = tests\n")
    utils.set_swift_dir(str(folder))
    conf = {"devices": str(folder), "swift_dir": str(folder), "mount_check": "false", "account_autocreate": "true"}
    for kind, controller in servers.items():
        listener = eventlet.listen(("127.0.0.1", 0))
        ring = RingBuilder(1, 1, 0)
        at = {"ip": "127.0.0.1", "port": listener.getsockname()[1], "device": "disk"}
        ring.add_dev({"id": 0, "region": 1, "zone": 1, "weight": 1.0, **at})
        ring.rebalance()
        ring.get_ring().save(str(folder / f"{kind}.ring.gz"))
        eventlet.spawn(wsgi.server, listener, controller(conf), log_output=False)
    app = tempauth.filter_factory({}, user_test_tester=f"{SECRET} .admin")(Application(conf))
    app = s3api.filter_factory({}, auth_pipeline_check="false", location="us-east-1")(app)
    for middleware in (listing_formats, gatekeeper, catch_errors):
        app = middleware.filter_factory({})(app)
    listener = eventlet.listen(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    wsgi.server(listener, told(app), log_output=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
