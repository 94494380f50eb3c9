-- Say whether a task was restored from a file before, and what it holds. Writes nothing.
-- KEYS[1] stream
-- ARGV    the call `FindRestored` of redrb/stream/saving/calls.py
-- Returns its reply
--@include restore_area task

local ask, how = cmsgpack.unpack(ARGV[1]), 'other'
if redis.call('HGET', task, 'restored_file') == ask.checksum then
  local unchanged = ever_put() == ask.put and is_whole(ask.whole)
  how = unchanged and 'unchanged' or 'restored'
end
return cmsgpack.pack({how = how, put = ever_put(), stored = stored_now()})
