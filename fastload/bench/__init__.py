"""`fastload bench`: what a loader gives, alone and in a training loop, beside the usual ways, and under faults."""
