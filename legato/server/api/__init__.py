"""The APIs: what each reads from a request and what it says of an answer, and what all of them share.

One package or file for each family, none of which knows another but by OpenAI's forms, which all of them build on. `server.app`
mounts them; the road to the engine is `server.generation`.
"""
