"""The ranks of one host as one engine: rank 0 plans, every rank computes each plan, and the loss of one is the end of all.

`board` is the memory that they share, `lead` what rank 0's engine launches plans through, `follow` the process of every other
rank, `watch` how a lost rank is seen and named, `join` how a rank comes by its part of the model.
"""
