-- Read a page of the history, by time of acknowledgement. Writes nothing.
-- KEYS[1] stream
-- ARGV    the call `Archived` of redrb/stream/task/calls.py
-- Returns its reply
--@include task

local ask, skip, found = cmsgpack.unpack(ARGV[1]), 0, {}
if ask.after ~= '' then -- members of one time are sorted: skip those already read
  local rank = redis.call('ZRANK', key('archive'), ask.after)
  if rank then
    skip = rank - redis.call('ZCOUNT', key('archive'), '-inf', '(' .. ask.since) + 1
  end
end
local page = redis.call('ZRANGEBYSCORE', key('archive'), ask.since, ask.to, 'WITHSCORES', 'LIMIT', skip,
  ask.count)
for i = 1, #page, 2 do
  found[#found + 1] = {tonumber(page[i]) or page[i], page[i + 1]}
end
return cmsgpack.pack(found)
