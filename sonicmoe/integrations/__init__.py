"""Bridges to model libraries; each module imports its library on use, not on import of this
package.
"""
