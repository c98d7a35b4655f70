import protos  # noqa: F401  its settings of gRPC come before gRPC
