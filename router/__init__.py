import os

# Since 1.80 gRPC passes every message to one more thread in Python: 30 us at each end of a wire. The engine
# of before is quicker to the workers, for as long as gRPC has it. The door keeps the new one, which writes
# the tokens of many streams together. Read when grpc is imported; who starts the process can say otherwise.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client")
