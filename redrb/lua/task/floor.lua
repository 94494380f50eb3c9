-- Say which groups are deleted for good, and whether one is stored, before stages forget forwarded groups.
-- KEYS[1] stream
-- ARGV    seq
-- Returns {incarnation, floor, 1 if this group is stored or 0}; all groups up to the id `floor` are deleted
--@include task

local oldest = redis.call('XRANGE', stream, '-', '+', 'COUNT', '1')[1]
local floor = oldest and seq_of(oldest[1]) - 1 or number(puts, 'last')
return {redis.call('HGET', task, 'incarnation') or '', string.format('%d', floor),
  redis.call('HEXISTS', key('facts'), member_of(tonumber(ARGV[1])))}
