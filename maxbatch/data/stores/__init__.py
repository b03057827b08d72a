"""Object stores, one file each; maxbatch.data.stores.registry names them."""
