-- Make a publisher the owner: earlier publishers are fenced, and can commit nothing more.
-- KEYS[1] versions
-- ARGV    the call `TakeOver` of redrb/weights/wire/calls.py
-- Returns the owner; repeated, it returns the same
--@include weights permissions

check_permissions(pins)
begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
return cmsgpack.pack(take_over(ask.name))
