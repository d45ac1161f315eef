import numpy as np
import txl_runtime
def test_it(make_bundle):
    m = txl_runtime.load(make_bundle(batch_size=3))
    s = m.stream()
    assert s.feed(np.zeros((3,9),int)).shape==(3,9,60)
