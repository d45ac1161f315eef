"""Prints how probable speech is in each 32 ms of a file (16 kHz, mono): `python voice.py vad.txl speech.wav`.

The network is silero-vad's; docs/from/onnx-audio.md says how to make the bundle from that package's ONNX file.
"""

import sys
import wave

import numpy as np
import txl_runtime

stream = txl_runtime.load(sys.argv[1]).stream(1)
samples = np.zeros((1, 64 + 512), np.float32)
with wave.open(sys.argv[2]) as audio:
    while len(data := audio.readframes(512)) == 2 * 512:
        # the graph also reads the last 64 samples of the previous chunk, which are not among its states
        samples[:, :64] = samples[:, -64:]
        samples[:, 64:] = np.frombuffer(data, np.int16) / 32768
        chance = stream.run({"input": samples})["output"][0, 0]
        print(f"{audio.tell() / 16000:6.2f} s  {chance:.2f}")
