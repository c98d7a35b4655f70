"""A server around an engine: takes hand-offs, decodes in continuous batches, streams tokens."""
