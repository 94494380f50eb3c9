-- Delete further keys of a table that is left; or forget it, if its values are deleted.
-- KEYS[1] stream
-- ARGV    the call `Forget` of redrb/table/calls.py
-- Returns the page: whether there is more to do, and 0 if the table is another's by now
--@include task table permissions

check_permissions(gone)
begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
if redis.call('HGET', task, 'left') ~= ask.token then
  return cmsgpack.pack({more = false, found = 0})
end
for _, name in ipairs(ask.names) do
  redis.call('UNLINK', key(name))
end
local more = #ask.names > 0 or redis.call('EXISTS', trash) == 1
if not more then
  redis.call('UNLINK', task)
end
return cmsgpack.pack({more = more, found = 1})
