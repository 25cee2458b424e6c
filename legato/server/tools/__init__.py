"""Tools: how clients define them, how a model calls them, and how text becomes the arguments of a call.

Pure functions and values; knows neither tokens nor HTTP.
"""
