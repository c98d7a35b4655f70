import os

# As in router/__init__.py, at both ends: a worker writes one message a step.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
