"""/v1/responses: OpenAI's newer form of a conversation, with items and events of its own. Nothing is stored."""
