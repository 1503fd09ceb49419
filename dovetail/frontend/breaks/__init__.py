"""Graph breaks: what is known about the values that live on after one."""
