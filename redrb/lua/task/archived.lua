-- Read a page of the history, by time of acknowledgement. Writes nothing.
-- KEYS[1] stream
-- ARGV    from ms, after member, to ms, count
--         after member: of the entries at `from`, skip those up to this member; '' skips none
-- Returns a flat list member, ms, ...
--@include task

local skip, count = 0, tonumber(ARGV[4])
if ARGV[2] ~= '' then -- members of one time are sorted: skip those already read
  local rank = redis.call('ZRANK', key('archive'), ARGV[2])
  if rank then
    skip = rank - redis.call('ZCOUNT', key('archive'), '-inf', '(' .. ARGV[1]) + 1
  end
end
return redis.call('ZRANGEBYSCORE', key('archive'), ARGV[1], ARGV[3], 'WITHSCORES', 'LIMIT', skip, count)
