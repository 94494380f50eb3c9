-- A rank's time is up: end the attempt to form the next step, for all ranks that asked for it.
-- KEYS[1] stream
-- ARGV    the call `EndAttempt` of redrb/stream/ranks/calls.py
-- Returns its reply
--@include task attempts

begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
local group, ranks = ask.group, key('ranks', ask.group)
local state, none = numbers(ranks, 'attempt', 'ended')
if none or state[1] ~= ask.attempt then
  return cmsgpack.pack(state[2] >= ask.attempt and 'ended' or 'formed')
end
end_attempt(group, 'short', missing_in(group, state[1]), ask.last_look)
return cmsgpack.pack('ended')
