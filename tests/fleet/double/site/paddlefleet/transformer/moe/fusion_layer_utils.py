"""Fleet's in-tree twin of `run_sonic_moe`, taken where the engine has none."""


def run_sonic_moe(*arguments, **keywords):
    raise NotImplementedError("the twin needs Sonic's own PyLayers")
