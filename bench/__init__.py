"""Every figure that the README quotes, one command each: `python -m bench.NAME --help`."""

import protos  # noqa: F401  its settings of gRPC come before gRPC: bare servers have them too
