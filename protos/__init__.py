"""What goes over the wire. The messages are compiled from the .proto files at build."""

import os

# Of all three services. Version N talks to N - 1 and to N + 1.
PROTOCOL_VERSION = 1

# Since 1.80 gRPC gives Python an engine that passes every message to one more thread: 30 us more at each end
# of a wire, and a tenth more processor time for a token. The one before, for as long as gRPC has it.
# It is read when grpc is imported: packages whose processes talk import this one first. Whoever starts a
# process can say otherwise.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
