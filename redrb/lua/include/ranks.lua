-- Wakes the ranks of a consumer group that wait for one another.
--@include task waiters

local function wake_ranks(group)
  -- bound: ranks, 4,096 at most (MOST_RANKS)
  for _, consumer in ipairs(redis.call('HVALS', key('ranks', group))) do
    send_wake(consumer .. '.rank')
  end
end
