-- Answer which groups are gone for good: stages then forget what they noted of forwarded groups.
-- KEYS[1] stream
-- ARGV    the call `Look` of redrb/stream/task/origin.py
-- Returns its reply; groups that may come back: include/dead_letters.lua
--@include task put_record

-- The reply has at most PAGE.buried_ids ids; if there are more of them, the floor is below the next one.

local ask = cmsgpack.unpack(ARGV[1])
local oldest = redis.call('XRANGE', stream, '-', '+', 'COUNT', '1')[1]
local floor = oldest and seq_of(oldest[1]) - 1 or last_counted()
local found = redis.call('ZRANGEBYSCORE', key('buried'), '-inf', string.format('%d', floor), 'WITHSCORES',
  'LIMIT', 0, PAGE.buried_ids + 1)
local kept = {}
for i = 2, #found, 2 do
  kept[#kept + 1] = found[i]
end
if #kept > PAGE.buried_ids then
  floor = tonumber(table.remove(kept)) - 1
end
local known = redis.call('HEXISTS', key('facts'), member_of(ask.seq))
if known == 0 then
  known = math.min(redis.call('ZCOUNT', key('buried'), ask.seq, ask.seq), 1)
end
return cmsgpack.pack({incarnation = redis.call('HGET', task, 'incarnation') or '', floor = floor,
  stored = known == 1, kept = kept})
