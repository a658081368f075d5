"""Expert parallelism: what a layer costs beside its products, and where it wins over gathering weights."""
