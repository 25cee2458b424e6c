"""Makes outcomes from plans and never decides anything: device rows, caches, batches and the iteration itself."""
