"""/v1/chat/completions, /v1/completions, /v1/models and what belongs to them; the forms that other APIs build on."""
