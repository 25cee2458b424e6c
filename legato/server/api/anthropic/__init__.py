"""/v1/messages and /v1/messages/count_tokens: a conversation in Anthropic's form."""
