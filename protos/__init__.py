"""What goes over the wire. The messages are compiled from the .proto files at build."""

# Of all three services. Version N talks to N - 1 and to N + 1.
PROTOCOL_VERSION = 1
