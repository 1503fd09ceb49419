"""Functions that a graph calls as one operator, because their parts cannot be recorded as eager runs them."""
