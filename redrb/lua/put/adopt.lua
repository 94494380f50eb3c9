-- Accept forwarded groups of an origin again, whose task was created anew, or has lost its newest writes.
-- KEYS[1] stream
-- ARGV    the call `Adopt` of redrb/stream/put/calls.py; include/sources.lua says what is stored
-- Returns its reply: whether the row is replaced
--@include task permissions

check_permissions(stream)
begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
local row = redis.call('HGET', key('sources'), ask.origin)
if not row or redis.sha1hex(row) ~= ask.row then
  return cmsgpack.pack(false)
end
if string.match(row, '^%S+') ~= ask.incarnation then
  redis.call('UNLINK', key('sources', ask.origin))
end
local kept = table.concat(ask.kept, ',')
redis.call('HSET', key('sources'), ask.origin,
  string.format('%s %d %d %s', ask.incarnation, ask.floor, ask.floor, kept))
return cmsgpack.pack(true)
