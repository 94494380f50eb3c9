-- Accept forwarded groups of an origin again, after its task was created anew, or has lost its newest writes.
-- KEYS[1] stream
-- ARGV    origin, row, incarnation, floor, kept
--         row: of the origin, as a put has returned it; another stage may have replaced it since
--         incarnation, floor, kept: of the origin, as its task says now; see include/sources.lua
-- Returns 1 | 0: the row is another one by now
--@include task permissions

check_permissions(stream)
begin_writing()
local origin, incarnation, floor = ARGV[1], ARGV[3], ARGV[4]
if redis.call('HGET', key('sources'), origin) ~= ARGV[2] then
  return 0
end
if string.match(ARGV[2], '^%S+') ~= incarnation then
  redis.call('UNLINK', key('sources', origin))
end
redis.call('HSET', key('sources'), origin, table.concat({incarnation, floor, floor, ARGV[5]}, ' '))
return 1
