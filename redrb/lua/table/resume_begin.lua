-- Begin to resume a table: from now on it is left, until all of it is there.
-- KEYS[1] stream
-- ARGV    the call `BeginResume` of redrb/table/calls.py
-- Returns "new"; "left" if values of an earlier attempt, or of a deleted table, are to be deleted; "used" if
--         there is a table; "resumed" if there is the one of the same file, whose tasks are to be registered
--@include task table permissions

check_permissions(gone)
begin_writing()
local ask, found = cmsgpack.unpack(ARGV[1]), redis.call('HMGET', task, 'number', 'left', 'resumed')
if found[1] then
  return cmsgpack.pack(found[3] == ask.resumed and 'resumed' or 'used')
end
redis.call('HSET', task, 'left', ask.token)
return cmsgpack.pack(found[2] and 'left' or 'new') -- a repetition does not know what was left before
