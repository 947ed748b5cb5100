"""Weight-only quantisation of linear layers and experts: the plan, the replacement modules and the cache of their
weights.
"""
