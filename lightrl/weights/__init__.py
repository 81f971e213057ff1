"""Weights on their way from trainer to engine: buckets, and what makes and takes them. Knows no HTTP and no Lightning.

Reading order:
    bucket.py    Bucket, and the generator that cuts parameters into buckets

May import: errors, trajectory, experience, functional.
"""

from lightrl.weights.bucket import Bucket, bucketed

__all__ = ["Bucket", "bucketed"]
