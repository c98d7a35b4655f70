"""A server around an engine: prefills, samples the first token, hands off."""
